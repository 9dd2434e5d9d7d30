"""Many prompts from a file: `generate --prompts FILE.jsonl`.

Each line is an object with a `prompt` and whatever differs from the flags (`KNOWN`); an `id` comes
back in the answer. A text that ends is written at once as a line of JSON, as is an `error`.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from minitri import End, GenerationConfig, InputError, Request
from minitri.apps.cli.arguments import taken
from minitri.apps.cli.boot import boot, running, sampling_of
from minitri.apps.cli.inputs import encode, read_text
from minitri.apps.cli.report import answer
from minitri.core.errors import shorten
from minitri.core.fields import check_names
from minitri.core.settings import TEXT_FIELDS
from minitri.text.prompt_ids import as_seeds, next_seed

if TYPE_CHECKING:
    from minitri import Engine

KNOWN = ("prompt", "id", "seed", *TEXT_FIELDS)


class Line(NamedTuple):
    """A line of --prompts that is not empty."""

    position: int  # among those lines, from 0; added to the seed
    number: int  # in the file, from 1
    id: Any  # by default the number
    fields: dict[str, Any]  # the others that are not null
    problem: str  # why the line is no object of JSON, if it is none


def many(args: argparse.Namespace) -> int:
    """Answers every line of --prompts. Raises `InputError` at the end if some were wrong."""
    from tqdm import tqdm  # with 20 ms of imports, which --help does not need

    lines = read_lines(args)
    results = answers(boot(args), lines, args)
    num_wrong = 0
    for result in tqdm(results, total=len(lines), unit=" prompts", disable=args.quiet or None):
        print(json.dumps(result, ensure_ascii=False), flush=True)
        num_wrong += "error" in result
    check_wrong(args, num_wrong, len(lines))
    return 0


def read_lines(args: argparse.Namespace) -> list[Line]:
    """The lines of --prompts that are not empty. Raises `InputError`."""
    lines: list[Line] = []
    for number, text in enumerate(read_text(args.prompts, "--prompts").split("\n"), 1):
        if text.strip(" \t\r"):
            fields = {}
            problem = ""
            try:
                fields = {k: v for k, v in {**json.loads(text)}.items() if v is not None}
            except (TypeError, ValueError, RecursionError) as error:
                problem = f" ({shorten(error, 140)})"
            lines.append(Line(len(lines), number, fields.pop("id", number), fields, problem))
    return lines


def check_wrong(args: argparse.Namespace, num_wrong: int, num_lines: int) -> None:
    """Raises `InputError` if lines were wrong, or there are none."""
    if num_wrong or not num_lines:
        got = f"{num_wrong} of {num_lines} lines of --prompts {shorten(args.prompts)} were wrong"
        raise InputError(f"{got}; the answers with an error say which, and why")


def answers(
    engine: "Engine", lines: Sequence[Line], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The answer to each line, as soon as it is done."""
    generation = taken(GenerationConfig, args)
    sampling, seed = sampling_of(args, engine, f"{len(lines)} prompts")
    heads: list[dict[str, Any]] = []
    requests = []
    for line in lines:
        head = {"id": line.id, "line": line.number}
        try:
            fields = {"seed": next_seed(seed, line.position), **line.fields}
            check_names(fields, KNOWN)
            [row_seed] = as_seeds(fields.pop("seed"), 1)
            if not isinstance(text := fields.pop("prompt", None), str):
                got = f"line {line.number} is no JSON object with a text as prompt{line.problem}"
                raise InputError(f'{got}; write such as {{"prompt": "Once"}}')
            request = Request(text, row_seed, sampling, generation, **fields)
            request.prompt = encode(text, engine, args, request.generation.max_new_tokens)
            requests.append(request)
            heads.append(head)
        except InputError as error:
            yield head | {"error": args.in_flags(error)}
    if requests:
        with running(args, engine, requests) as run:
            for end in (event for event in run if isinstance(event, End)):
                cached = {"num_cached_tokens": end.row_stats.num_cached_tokens}
                yield heads[end.row] | answer(run.rows[end.row]) | cached
