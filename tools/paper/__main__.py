"""The paper by command: every table and figure, measured here, next to the published numbers.

    python -m tools.paper                      # what there is, and how long it takes
    python -m tools.paper all --texts novels
    python -m tools.paper table2 fig6a --texts novels --out study

Stop it at any moment: started again, it goes on with what is missing.
"""

import shlex
from argparse import Namespace
from pathlib import Path

import torch

from minitri.apps.cli.arguments import OneLineParser
from minitri.apps.cli.exits import program
from minitri.core.errors import InputError, explain, shorten
from tools.paper.items import ITEMS
from tools.paper.lab import Lab
from tools.paper.scale import SCALES
from tools.paper.study import Study
from tools.paper.texts import load_texts


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m tools.paper", description=__doc__)
    add = parser.add_argument
    add("items", nargs="*", metavar="ITEM", help="or all; without any: a list")
    add("--out", default="study", metavar="DIR", help="where cells and reports are kept")
    add("--scale", default="cpu", choices=SCALES, help="sizes of model and texts")
    add("--model", help="instead of the scale's own, as for minitri.load")
    add("--texts", metavar="PATH", help="folder of PG-19, NarrativeQA, *.txt, *.parquet, *.jsonl")
    add("--again", action="store_true", help="measure anew what another commit measured")
    return parser


def run_command(args: Namespace) -> None:
    """Measures the items, or lists all. Raises `InputError`, `OSError`."""
    from tools.paper.report import overview, write_report  # matplotlib: without it one line

    if not args.items:
        print(overview().markdown())
        return
    known = ["all", *(item.name for item in ITEMS)]
    for name in args.items:
        if name not in known:
            raise InputError(f"there is no item {shorten(name, 40)}; give {', '.join(known)}")
    items = [item for item in ITEMS if {"all", item.name} & {*args.items}]
    if args.scale == "gpu" and not torch.cuda.is_available():
        raise InputError("--scale gpu needs a CUDA device, and there is none; give --scale cpu")
    scale = SCALES[args.scale]
    out = Path(args.out)
    lab = Lab(scale, load_texts(args.texts, scale.num_texts), args.model)
    with explain(f"--out {shorten(out)} cannot be written", "give a folder"):
        out.mkdir(parents=True, exist_ok=True)
    given = {name: vars(args)[name] for name in ("scale", "model", "texts", "out")}
    flags = (f" --{name} {shlex.quote(value)}" for name, value in given.items() if value)
    study = Study(out, lab, "".join(flags), items if args.again else ())
    write_report(study)  # before hours of measuring: can it be written?
    for item in items:
        study.measure(item, items)
        write_report(study, item)


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
