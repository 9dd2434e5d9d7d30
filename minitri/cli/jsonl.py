"""Many prompts from a file: `generate --prompts FILE.jsonl`.

Each line is an object with a `prompt` and whatever differs from the flags (`KNOWN`); an `id` comes
back in the answer. A text that ends is written at once as a line of JSON, as is an `error`.
"""

import argparse
import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from minitri import (
    End,
    GenerationConfig,
    InputError,
    Request,
    SpeculationConfig,
    Token,
)
from minitri.cli.arguments import SAMPLING, in_flags
from minitri.cli.boot import boot, conclude, sampling_of
from minitri.cli.inputs import encode, read_text
from minitri.cli.report import answer
from minitri.errors import explain, shorten
from minitri.fields import changed, check_names
from minitri.loading.prompt_ids import MAX_SEED, as_seeds

if TYPE_CHECKING:
    from minitri import Engine, Generation

KNOWN = ("prompt", "id", "seed", "max_new_tokens", "stop", "ignore_eos", *SAMPLING)
"""What a line may say."""


def run_lines(
    args: argparse.Namespace, generation: GenerationConfig, speculation: SpeculationConfig
) -> None:
    """Answers every line of --prompts. Raises `InputError` at last if some were wrong."""
    numbered = enumerate(read_text(args.prompts, "--prompts").splitlines(), 1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    engine, _ = boot(args)
    sampling, seed = sampling_of(args, engine, f"{len(lines)} prompts")
    heads: list[dict[str, Any]] = []
    requests = []
    for index, (number, line) in enumerate(lines):
        default = Request("", (seed + index) % (MAX_SEED + 1), sampling, generation)
        head = {"id": number, "line": number}
        try:
            fields = read_line(line)
            head["id"] = fields.get("id", number)
            requests.append(request_of(fields, args, engine, default))
            heads.append(head)
        except InputError as error:
            write(head, {"error": in_flags(error, args.flags)})
    if requests:
        run = engine.stream(
            requests, batch_size=args.batch_size, generation=generation, speculation=speculation
        )
        write_answers(run, heads, quiet=args.quiet)
        conclude(args, engine, run)
    if len(requests) < max(len(lines), 1):
        num_wrong = len(lines) - len(requests)
        file = shorten(args.prompts)
        problem = f"{num_wrong} of {len(lines)} lines of --prompts {file} were wrong"
        raise InputError(f"{problem}; the answers with an error say which, and why")


def read_line(line: str) -> dict[str, Any]:
    """The object in a line. Raises `InputError` if it is wrong."""
    with explain("it is no object of JSON", "write one"):
        fields = {**json.loads(line)}
    check_names(fields, KNOWN)
    if not isinstance(fields.get("prompt"), str):
        raise InputError("there is no prompt; give a text")
    return fields


def request_of(
    fields: dict[str, Any], args: argparse.Namespace, engine: "Engine", default: Request
) -> Request:
    """What a line asks for, the rest as in `default`. Raises `InputError`."""
    [seed] = as_seeds(fields.get("seed", default.seed or 0), 1)
    generation = changed(default.generation, fields)
    num_new = generation.max_new_tokens
    ids = encode(fields["prompt"], engine.tokenizer, engine.config, num_new, args)
    return Request(ids, seed, changed(default.sampling, fields), generation)


def write_answers(run: "Generation", heads: list[dict[str, Any]], *, quiet: bool) -> None:
    """Writes each text as it ends."""
    tokens: defaultdict[int, list[Token]] = defaultdict(list)
    with tqdm(total=len(heads), unit=" prompts", disable=True if quiet else None) as bar:
        for event in run:
            if isinstance(event, Token):
                tokens[event.row].append(event)
            elif isinstance(event, End):
                row = run.rows[event.row]
                write(heads[event.row], answer(row, event.finish_reason, tokens.pop(event.row)))
                bar.update()


def write(head: dict[str, Any], content: dict[str, Any]) -> None:
    """A line of the output."""
    print(json.dumps(head | content, ensure_ascii=False), flush=True)
