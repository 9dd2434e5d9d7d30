"""Builds a datastore out of texts, for a drafter that looks words up there (REST, arXiv
2311.08252).

    python -m tools.paper.build_datastore --model smollm2-135m --out novels.datastore a.txt b.txt

The texts are cut into the model's tokens, and all their places are sorted by what stands before
them (`baselines/datastore.py`). It needs about 60 bytes of memory per token meanwhile, and
6 on disk (8 where the vocabulary has 65,536 tokens or more). All models with the same vocabulary
can use the file. It gets its name when it is whole.
"""

import argparse
import time
from pathlib import Path

from minitri.cli import arguments
from minitri.cli.exits import program
from minitri.errors import InputError, shorten
from minitri.loading.named_models import DEFAULT_MODEL, ModelChoice
from minitri.loading.open_models import OpenModel
from tools.paper.baselines.datastore import write_datastore


def build_parser() -> arguments.OneLineParser:
    parser = arguments.OneLineParser(description=__doc__)
    text = "whose tokens: what --model of minitri.generate takes (default: %(default)s)"
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME|PATH|ORG/REPO", help=text)
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the file to write")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="UTF-8 files")
    return parser


def run_command(args: argparse.Namespace) -> None:
    """Does what the flags say. Raises `InputError`."""
    texts = [read_text(file) for file in args.texts]
    tokenizer = OpenModel(ModelChoice(args.model)).tokenizer
    if tokenizer is None:
        raise InputError(f"{args.model} is a drafter without a tokenizer; give its target's name")
    started = time.perf_counter()
    ids = [tokenizer.encode(text) for text in texts]
    read = time.perf_counter()
    size = write_datastore(args.out, ids, tokenizer)
    print(
        f"{args.out}: {sum(map(len, ids))} tokens of {len(ids)} texts, {size / 1e6:.1f} MB; "
        f"tokens in {read - started:.1f} s, sorted in {time.perf_counter() - read:.1f} s"
    )


def read_text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the name
        reason = shorten(getattr(error, "strerror", None) or error, 90)
        raise InputError(f"cannot read {shorten(file)} ({reason}); give UTF-8 texts") from None


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
