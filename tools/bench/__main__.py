"""Measurements around the benchmark of the package: `python -m tools.bench`.

    python -m tools.bench --prompt-tokens 8000 --new-tokens 64 --profile
    python -m tools.bench --compare --peer openvino --peer llama.cpp
    python -m tools.bench --load dummy --shape llama2-7b-128k --context 122880

measures the model alone against the floor that memory bandwidth sets (`floor.py`); or, as
`minitri bench --compare`, the methods against one another and against other programs (`peers/`);
or a shape with made-up weights and verdicts (`synthetic.py`).
"""

import argparse
import functools
import os
from collections.abc import Callable

from minitri.apps import bench
from minitri.apps.bench import Run
from minitri.apps.cli import arguments
from minitri.apps.cli.exits import program
from minitri.core.errors import InputError
from minitri.core.requests import Request
from minitri.engine import Engine
from minitri.files.fetch import locate
from tools.bench.floor import run_floor
from tools.bench.peers import run_peer
from tools.bench.peers.choice import PEERS, find_peers, peer_names, peer_python
from tools.bench.synthetic import add_synthetic_flags, run_synthetic


def build_parser() -> arguments.OneLineParser:
    """The flags of `minitri bench`, and those of what is here."""
    parser = arguments.OneLineParser(
        prog="python -m tools.bench",
        usage="%(prog)s [flags]",
        description="Speed against the floor of memory bandwidth, other programs, made-up models.",
    )
    bench.add_flags(parser)
    add = parser.add_argument
    text = "say where the time of a decoding step goes"
    add("--profile", action="store_true", help=text)
    text = "runs to measure, without --compare"
    add("--repeats", type=arguments.positive, default=3, metavar="N", help=text)
    text = "a peer, or all whose names begin so; may be given several times: " + ", ".join(PEERS)
    add("--peer", type=peer_names, action="extend", default=[], metavar="NAME", help=text)
    text = "the Python interpreter that has openvino-genai or llama-cpp-python, if not this one"
    name = "PROGRAM=PATH"
    add("--peer-python", type=peer_python, action="append", default=[], metavar=name, help=text)
    add_synthetic_flags(parser)
    return parser


def run_command(args: argparse.Namespace) -> None:
    """Does what the flags say. Raises `InputError`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler writes to the screen
    of_comparisons = ("peer", "peer_python", "methods", "coupled")
    given = [f"--{name.replace('_', '-')}" for name in of_comparisons if getattr(args, name)]
    if args.load == "dummy":
        run_synthetic(args)
    elif args.compare:
        pythons = dict(args.peer_python)

        def peers(engine: Engine) -> dict[str, Callable[[Request], Run]]:
            found = find_peers(locate(args.model).path, engine, args.peer, pythons)
            return {name: functools.partial(run_peer, start) for name, start in found.items()}

        bench.measure(args, peers)
    elif given or len(args.prompt_file or []) > 1:
        raise InputError(f"{', '.join(given) or 'several --prompt-file'}: these need --compare")
    else:
        run_floor(args)


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
