"""Many prompts from a file: `generate --prompts FILE.jsonl`.

Each line is an object with a `prompt` and whatever differs from the flags (`KNOWN`); an `id` comes
back in the answer. A text that ends is written at once as a line of JSON, as is an `error`.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from minitri import End, GenerationConfig, InputError, Request, SpeculationConfig
from minitri.apps.cli.boot import boot, conclude, sampling_of
from minitri.apps.cli.inputs import encode, read_text
from minitri.apps.cli.report import answer
from minitri.core.errors import explain, shorten
from minitri.core.fields import check_names
from minitri.core.settings import TEXT_FIELDS
from minitri.text.prompt_ids import as_seeds, next_seed

if TYPE_CHECKING:
    from minitri import Engine

KNOWN = ("prompt", "id", "seed", *TEXT_FIELDS)
"""What a line may say."""
Line = tuple[int, int, str]
"""Its index among those that are not empty, which decides the seed; its number; its text."""


def run_lines(
    args: argparse.Namespace, generation: GenerationConfig, speculation: SpeculationConfig
) -> None:
    """Answers every line of --prompts. Raises `InputError` at last if some were wrong."""
    lines = read_lines(args)
    told = answers(boot(args), lines, args, generation, speculation)
    num_wrong = 0
    for it in tqdm(told, total=len(lines), unit=" prompts", disable=args.quiet or None):
        write(it)
        num_wrong += "error" in it
    check_wrong(args, num_wrong, len(lines))


def read_lines(args: argparse.Namespace) -> list[Line]:
    """Those of --prompts that are not empty."""
    numbered = enumerate(read_text(args.prompts, "--prompts").splitlines(), 1)
    full = (pair for pair in numbered if pair[1].strip())
    return [(index, *pair) for index, pair in enumerate(full)]


def check_wrong(args: argparse.Namespace, num_wrong: int, num_lines: int) -> None:
    """Raises `InputError` if lines were wrong, or there are none."""
    if num_wrong or not num_lines:
        raise InputError(
            f"{num_wrong} of {num_lines} lines of --prompts "
            f"{shorten(args.prompts)} were wrong; the answers with an error say which, and why"
        )


def answers(
    engine: "Engine",
    lines: Sequence[Line],
    args: argparse.Namespace,
    generation: GenerationConfig,
    speculation: SpeculationConfig,
) -> Iterator[dict[str, Any]]:
    """What is answered to each line, when it is done."""
    sampling, seed = sampling_of(args, engine, f"{len(lines)} prompts")
    heads = []
    requests = []
    for index, number, line in lines:
        head = {"id": number, "line": number}
        try:
            with explain("it is no object of JSON", "write one"):
                fields = {"seed": next_seed(seed, index), **json.loads(line)}
            head["id"] = fields.pop("id", number)
            check_names(fields, KNOWN)
            [own_seed] = as_seeds(fields.pop("seed"), 1)
            if not isinstance(text := fields.pop("prompt", None), str):
                raise InputError("there is no prompt; give a text")
            request = Request(text, own_seed, sampling, generation, **fields)
            num_new = request.generation.max_new_tokens
            request.prompt = encode(text, engine.tokenizer, engine.config, num_new, args)
            requests.append(request)
            heads.append(head)
        except InputError as error:
            yield head | {"error": args.in_flags(error)}
    if requests:
        run = engine.stream(
            requests, batch_size=args.batch_size, generation=generation, speculation=speculation
        )
        for end in (event for event in run if isinstance(event, End)):
            cached = {"num_cached_tokens": end.row_stats.num_cached_tokens}
            yield heads[end.row] | answer(run.rows[end.row]) | cached
        conclude(args, engine, run)


def write(answer: dict[str, Any]) -> None:
    """A line of the output."""
    print(json.dumps(answer, ensure_ascii=False), flush=True)
