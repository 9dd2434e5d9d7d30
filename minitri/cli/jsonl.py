"""Many prompts from a file: `generate --prompts FILE.jsonl`.

Each line of the file is an object with a `prompt` or `token_ids`, and whatever differs from the
flags: `id`, `seed`, `max_new_tokens`, `stop`, `ignore_eos`, `temperature`, `top_k`, `top_p`,
`min_p`. As soon as a text ends it is written as one line of JSON, so an interrupted run loses
nothing that was finished. A line that is wrong is answered by a line with an `error`; the others
run.
"""

import argparse
import dataclasses
import json
import logging
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from minitri.cli.boot import SAMPLING, boot, load_kv, model_sampling, save_kv, seed_of
from minitri.cli.inputs import cut, encode, encode_chat, read_text, room_for
from minitri.cli.report import details, log_probs, outline
from minitri.config import ModelConfig
from minitri.errors import InputError, shorten
from minitri.events import End, Token
from minitri.loading.prompts import MAX_SEED, as_seeds, check_prompt
from minitri.loading.tokenizer import Tokenizer
from minitri.parallel.ranks import join
from minitri.requests import Request
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig

log = logging.getLogger("minitri")

ENDING = ["max_new_tokens", "stop", "ignore_eos"]
KNOWN = ["prompt", "token_ids", "id", "seed", *ENDING, *SAMPLING]
"""What a line may say."""


@dataclass
class Line:
    """A line of the file: a request, or what is wrong with it."""

    number: int
    """From 1 on."""
    name: Any
    """Its `id`; by default the number."""
    request: Request | None = None
    error: str = ""
    fields: frozenset[str] = frozenset()
    """What it says itself."""

    def answer(self, **others: Any) -> str:
        """A line of the output."""
        return json.dumps({"id": self.name, "line": self.number, **others}, ensure_ascii=False)


def read_requests(
    text: str, sampling: SamplingParams, generation: GenerationConfig, seed: int
) -> list[Line]:
    """The lines of a file that are not empty; the n-th one has the seed `seed + n` by default."""
    lines, names = [], set()
    for number, content in enumerate(text.splitlines(), 1):
        if not content.strip():
            continue
        line = Line(number, number)
        lines.append(line)
        try:
            fields = _object(content)
            line.name = fields.get("id", number)
            if not isinstance(line.name, str | int):
                line.name = number
                raise InputError(f"id is {shorten(repr(fields['id']), 60)}; give a text or number")
            if line.name in names:
                raise InputError(
                    f"id {shorten(repr(line.name), 60)} was there before; give another"
                )
            names.add(line.name)
            line.fields = frozenset(fields)
            own = (seed + len(lines) - 1) % (MAX_SEED + 1)
            line.request = _request(fields, sampling, generation, own)
        except InputError as error:
            line.error = str(error)
    return lines


def _object(content: str) -> dict[str, Any]:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is no JSON: {shorten(error, 90)}; write one object a line") from None
    if not isinstance(fields, dict):
        raise InputError(
            f'it is {shorten(content, 60)}; write an object, such as {{"prompt": ...}}'
        )
    if unknown := sorted(fields.keys() - set(KNOWN)):
        known = ", ".join(KNOWN)
        raise InputError(f"{shorten(unknown[0], 60)!r} is unknown; known are {known}")
    if ("prompt" in fields) == ("token_ids" in fields):
        raise InputError("it has prompt and token_ids, or neither; give one of them")
    return fields


def _request(
    fields: dict[str, Any], sampling: SamplingParams, generation: GenerationConfig, seed: int
) -> Request:
    """A request of what a line says, and else of the flags. Raises `InputError`."""
    text, ids = fields.get("prompt", ""), fields.get("token_ids", [])
    if not isinstance(text, str):
        raise InputError(f"prompt is {shorten(repr(text), 60)}; give a text")
    if not (isinstance(ids, list) and all(type(token) is int for token in ids)):
        raise InputError(f"token_ids is {shorten(repr(ids), 60)}; give a list of whole numbers")
    [seed] = as_seeds(fields.get("seed", seed), 1)
    changes = {name: fields[name] for name in ENDING if name in fields}
    return Request(
        text if "prompt" in fields else ids,
        seed,
        dataclasses.replace(sampling, **{n: fields[n] for n in SAMPLING if n in fields}),
        dataclasses.replace(generation, **changes),
    )


def run_requests(
    args: argparse.Namespace, sampling: SamplingParams, generation: GenerationConfig,
    speculation: SpeculationConfig, draft: str,
) -> int:  # fmt: skip
    """Writes a line for every line of --prompts; returns the exit code. Raises `InputError` in the
    end if some were wrong."""
    text = join().ask_first(lambda: read_text(args.prompts))
    lines = read_requests(text, sampling, generation, args.seed or 0)
    if not lines:
        raise InputError(f"{shorten(args.prompts)} has no lines; write one object a line")

    def check(tokenizer: Tokenizer, config: ModelConfig) -> None:
        for line in lines:
            try:
                if line.request is not None:
                    line.request = _encoded(line.request, tokenizer, config, args)
            except InputError as error:
                line.request, line.error = None, str(error)
        _report_errors(lines)

    engine = boot(args, draft, check)
    good = [line for line in lines if line.request is not None]
    defaults = model_sampling(args, engine)
    args.temperature = defaults.get("temperature", args.temperature)
    first_seed = seed_of(args, speculation) if args.seed is None else 0
    requests = [_completed(line, defaults, first_seed) for line in good]
    load_kv(args, engine)
    run = engine.stream(
        requests, batch_size=args.batch_size, generation=generation, speculation=speculation
    )
    quiet, num_done = True if args.quiet else None, 0
    tokens: defaultdict[int, list[Token]] = defaultdict(list)
    with closing(run), tqdm(total=len(good), unit=" prompts", disable=quiet) as bar:
        try:
            for event in run:
                if isinstance(event, Token):
                    tokens[event.row].append(event)
                if isinstance(event, End):
                    line, row = good[event.row], run.rows[event.row]
                    print(line.answer(
                        text=event.text, token_ids=event.token_ids,
                        finish_reason=event.finish_reason, seed=row.request.seed,
                        num_prompt_tokens=row.num_prompt_tokens, **log_probs(tokens.pop(event.row)),
                    ), flush=True)  # fmt: skip
                    num_done += 1
                    bar.update()
        except KeyboardInterrupt:
            bar.close()
            log.info("interrupted: %d of %d prompts are written", num_done, len(good))
            return 130
    log.info(outline(engine, run))
    if args.stats:
        log.info(details(engine, run))
    save_kv(args, engine, max(row.stats.num_cached_tokens for row in run.rows))
    if len(good) < len(lines):
        num_wrong = len(lines) - len(good)
        raise InputError(f"{num_wrong} of {len(lines)} lines were wrong, the others are written")
    return 0


def _encoded(
    request: Request, tokenizer: Tokenizer, config: ModelConfig, args: argparse.Namespace
) -> Request:
    num_new, most = request.generation.max_new_tokens, args.max_prompt_tokens
    if isinstance(request.prompt, str) and args.chat:
        ids = encode_chat(request.prompt, tokenizer, config, most, num_new, args)
    elif isinstance(request.prompt, str):
        ids = encode(request.prompt, tokenizer, config, most, num_new, args.fit)
    else:
        ids = list(request.prompt)
        ids = cut(ids, room_for(config, most, num_new), args.fit) if args.fit else ids[:most]
    check_prompt(ids, config, num_new)
    return dataclasses.replace(request, prompt=ids)


def _completed(line: Line, defaults: dict[str, Any], first_seed: int) -> Request:
    """Its request, with the model's sampling and the seed that was drawn where it says nothing."""
    assert line.request is not None
    sampling = {name: value for name, value in defaults.items() if name not in line.fields}
    seed = line.request.seed + first_seed * ("seed" not in line.fields)
    return dataclasses.replace(
        line.request,
        seed=seed % (MAX_SEED + 1),
        sampling=dataclasses.replace(line.request.sampling, **sampling),
    )


def _report_errors(lines: list[Line]) -> None:
    """Answers the lines that are wrong. Raises `InputError` if all are."""
    for line in lines:
        if line.request is None:
            print(line.answer(error=line.error), flush=True)
            log.warning("line %d: %s", line.number, line.error)
    if not any(line.request for line in lines):
        raise InputError(f"all {len(lines)} lines are wrong; nothing is left to run")
