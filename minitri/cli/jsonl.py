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
from typing import Any

from tqdm import tqdm

from minitri.cli.arguments import SAMPLING
from minitri.cli.boot import boot, load_kv, model_sampling, save_kv, seed_of
from minitri.cli.inputs import cut, encode, read_text
from minitri.cli.report import details, log_probs, outline
from minitri.config import ModelConfig
from minitri.errors import InputError, shorten
from minitri.generation import Generation
from minitri.loading.prompt_ids import MAX_SEED, as_seeds, check_prompt
from minitri.loading.tokenizer import Tokenizer
from minitri.parallel.ranks import join
from minitri.requests import End, Request, Token
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig

log = logging.getLogger("minitri")

ENDING = ["max_new_tokens", "stop", "ignore_eos"]
KNOWN = ["prompt", "token_ids", "id", "seed", *ENDING, *SAMPLING]
"""What a line may say."""


@dataclasses.dataclass
class Line:
    """A line of the file, and what it asks for."""

    number: int
    """From 1 on."""
    index: int
    """Among the lines that are not empty, from 0 on: seeds count by it."""
    name: Any
    """Its `id`; by default the number."""
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    def read(self, content: str) -> None:
        """Takes the object in. Raises `InputError` unless it has one prompt and known fields."""
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            problem = f"it is no JSON: {shorten(error, 90)}"
            raise InputError(f"{problem}; write one object a line") from None
        if not isinstance(fields, dict):
            line = shorten(content, 60)
            raise InputError(f'it is {line}; write an object, such as {{"prompt": ...}}')
        if unknown := sorted(fields.keys() - set(KNOWN)):
            known = ", ".join(KNOWN)
            raise InputError(f"{shorten(unknown[0], 60)!r} is unknown; known are {known}")
        if ("prompt" in fields) == ("token_ids" in fields):
            raise InputError("it has prompt and token_ids, or neither; give one of them")
        ids = fields.get("token_ids", [])
        are_ids = isinstance(ids, list) and all(type(token) is int for token in ids)
        for name, is_fine, wanted in (
            ("prompt", isinstance(fields.get("prompt", ""), str), "a text"),
            ("token_ids", are_ids, "a list of whole numbers"),
            ("id", isinstance(fields.get("id", ""), str | int), "a text or number"),
        ):
            if not is_fine:
                raise InputError(f"{name} is {shorten(repr(fields[name]), 60)}; give {wanted}")
        self.name = fields.get("id", self.number)
        self.fields = fields

    def encode(self, tokenizer: Tokenizer, config: ModelConfig, args: argparse.Namespace) -> None:
        """Puts token ids in the place of its prompt. Raises `InputError`."""
        num_new = self.fields.get("max_new_tokens", args.max_new_tokens)
        sizes = config, args.max_prompt_tokens, num_new
        if "prompt" in self.fields:
            ids = encode(self.fields.pop("prompt"), tokenizer, *sizes, args)
        else:
            ids = cut(self.fields["token_ids"], *sizes, args.fit)
        check_prompt(ids, config, num_new)
        self.fields["token_ids"] = ids

    def request(self, sampling: SamplingParams, generation: GenerationConfig, seed: int) -> Request:
        """What it asks for; the rest is by these settings. Raises `InputError`."""
        own = self.fields
        [seed] = as_seeds(own.get("seed", (seed + self.index) % (MAX_SEED + 1)), 1)
        sampling = dataclasses.replace(sampling, **{n: own[n] for n in SAMPLING if n in own})
        generation = dataclasses.replace(generation, **{n: own[n] for n in ENDING if n in own})
        return Request(own.get("token_ids", ()), seed, sampling, generation)

    def answer(self, **others: Any) -> str:
        """A line of the output."""
        return json.dumps({"id": self.name, "line": self.number, **others}, ensure_ascii=False)


def run_lines(
    args: argparse.Namespace,
    sampling: SamplingParams,
    generation: GenerationConfig,
    speculation: SpeculationConfig,
    draft: str,
) -> int:
    """Answers every line of --prompts; returns the exit code. Raises `InputError` at last."""
    text = join().ask_first(lambda: read_text(args.prompts))
    contents = [item for item in enumerate(text.splitlines(), 1) if item[1].strip()]
    if not contents:
        raise InputError(f"{shorten(args.prompts)} has no lines; write one object a line")
    lines: dict[Any, Line] = {}

    def check(tokenizer: Tokenizer, config: ModelConfig) -> None:
        for index, (number, content) in enumerate(contents):
            line = Line(number, index, number)
            try:
                line.read(content)
                if line.name in lines:
                    name = shorten(repr(line.name), 60)
                    raise InputError(f"id {name} was there before; give another")
                line.request(sampling, generation, 0)
                line.encode(tokenizer, config, args)
                lines[line.name] = line
            except InputError as error:
                print(line.answer(error=str(error)), flush=True)
                log.warning("line %d: %s", number, error)
        if not lines:
            raise InputError(f"all {len(contents)} lines are wrong; nothing is left to run")

    engine = boot(args, draft, check)
    sampling = dataclasses.replace(sampling, **model_sampling(args, engine))
    args.temperature = sampling.temperature
    seed = seed_of(args, speculation)
    load_kv(args, engine)
    requests = [line.request(sampling, generation, seed) for line in lines.values()]
    run = engine.stream(
        requests, batch_size=args.batch_size, generation=generation, speculation=speculation
    )
    with closing(run):
        num_done = _write(run, [*lines.values()], quiet=args.quiet)
    if num_done < len(lines):
        log.info("interrupted: %d of %d prompts are written", num_done, len(lines))
        return 130
    log.info(outline(engine, run))
    if args.stats:
        log.info(details(engine, run))
    save_kv(args, engine, max(row.stats.num_cached_tokens for row in run.rows))
    if num_wrong := len(contents) - len(lines):
        raise InputError(f"{num_wrong} of {len(contents)} lines were wrong, the others are written")
    return 0


def _write(run: Generation, lines: list[Line], *, quiet: bool) -> int:
    """Writes each text as it ends; returns how many, fewer than all if Ctrl-C came."""
    tokens: defaultdict[int, list[Token]] = defaultdict(list)
    num_done = 0
    with tqdm(total=len(lines), unit=" prompts", disable=True if quiet else None) as bar:
        try:
            for event in run:
                if isinstance(event, Token):
                    tokens[event.row].append(event)
                if isinstance(event, End):
                    row = run.rows[event.row]
                    answer: dict[str, Any] = {"text": event.text, "token_ids": event.token_ids}
                    answer |= {"finish_reason": event.finish_reason, "seed": row.request.seed}
                    answer |= {"num_prompt_tokens": row.num_prompt_tokens}
                    answer |= log_probs(tokens.pop(event.row))
                    print(lines[event.row].answer(**answer), flush=True)
                    num_done += 1
                    bar.update()
        except KeyboardInterrupt:
            pass
    return num_done
