"""Measurements around the benchmark of the package: `python -m tools.bench`.

    python -m tools.bench people
    python -m tools.bench --max-prompt-tokens 8000 --max-new-tokens 64 --profile
    python -m tools.bench --load dummy --shape llama2-7b-128k --context 122880

measures what people meet, next to other engines; or the model alone against the floor that memory
bandwidth sets; or a shape with made-up weights and verdicts (`people`, `floor`, `synthetic`).
`python -m tools.bench auto` measures what speculation gains in forty settings.
"""

import argparse
import os
import sys

from minitri.apps.cli import arguments
from minitri.apps.cli.exits import program
from minitri.core.errors import InputError
from tools.bench import auto, people
from tools.bench.floor import run_floor
from tools.bench.synthetic import add_synthetic_flags, run_synthetic
from tools.flags import positive


def build_parser() -> arguments.OneLineParser:
    """The flags of `minitri bench`, and those of what is here."""
    parser = arguments.OneLineParser("bench")
    parser.prog = "python -m tools.bench"
    parser.usage = "%(prog)s [flags] | %(prog)s people --help | %(prog)s auto --help"
    parser.description = "Speed against memory's bandwidth, other engines, made-up models."
    parser.epilog = None
    text = "say where the time of a decoding step goes"
    parser.add_argument("--profile", action="store_true", help=text)
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="runs to measure")
    add_synthetic_flags(parser)
    return parser


def run_command(args: argparse.Namespace) -> None:
    """Does what the flags say. Raises `InputError`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler writes to the screen
    if args.load == "dummy":
        run_synthetic(args)
    elif args.compare or args.methods or args.coupled or len(args.prompt_files or []) > 1:
        raise InputError("methods and several texts are for minitri bench --compare; use that")
    else:
        run_floor(args)


measure = program(build_parser, run_command)


def main(argv: list[str] | None = None) -> None:
    """Runs `people` or `auto`, if that is the first word, or one of the others."""
    words = sys.argv[1:] if argv is None else argv
    programs = {"people": people.main, "auto": auto.main}
    if words[:1] and words[0] in programs:
        programs[words[0]](words[1:])
    else:
        measure(words)


if __name__ == "__main__":
    main()
