"""Many prompts from a file: `generate --prompts FILE.jsonl`.

Each line is an object with a `prompt` and whatever differs from the flags (`KNOWN`); an `id` comes
back in the answer. A text that ends is written at once as a line of JSON, as is an `error`.
"""

import argparse
import json
from typing import Any

from tqdm import tqdm

from minitri import End, GenerationConfig, InputError, Request, SpeculationConfig
from minitri.cli.boot import boot, conclude, sampling_of
from minitri.cli.inputs import encode, read_text
from minitri.cli.report import answer
from minitri.errors import explain, shorten
from minitri.fields import check_names
from minitri.loading.prompt_ids import as_seeds, next_seed
from minitri.settings import TEXT_FIELDS

KNOWN = ("prompt", "id", "seed", *TEXT_FIELDS)
"""What a line may say."""


def run_lines(
    args: argparse.Namespace, generation: GenerationConfig, speculation: SpeculationConfig
) -> None:
    """Answers every line of --prompts. Raises `InputError` at last if some were wrong."""
    numbered = enumerate(read_text(args.prompts, "--prompts").splitlines(), 1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    engine = boot(args)
    sampling, seed = sampling_of(args, engine, f"{len(lines)} prompts")
    heads = []
    requests = []
    for index, (number, line) in enumerate(lines):
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
            write(head | {"error": args.in_flags(error)})
    if requests:
        run = engine.stream(
            requests, batch_size=args.batch_size, generation=generation, speculation=speculation
        )
        ends = (event for event in run if isinstance(event, End))
        hidden = args.quiet or None
        for end in tqdm(ends, total=len(heads), unit=" prompts", disable=hidden):
            write(heads[end.row] | answer(run.rows[end.row]))
        conclude(args, engine, run)
    if len(requests) < max(len(lines), 1):
        raise InputError(
            f"{len(lines) - len(requests)} of {len(lines)} lines of --prompts "
            f"{shorten(args.prompts)} were wrong; the answers with an error say which, and why"
        )


def write(answer: dict[str, Any]) -> None:
    """A line of the output."""
    print(json.dumps(answer, ensure_ascii=False), flush=True)
