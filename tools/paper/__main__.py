"""The paper by command: every table and figure on the model and machine at hand, next to the
published numbers.

    python -m tools.paper                      # what there is, and how long it takes
    python -m tools.paper all --out study --texts novels
    python -m tools.paper table2 fig6a --out study --texts novels

Stop it at any moment: started again, it goes on with what is missing.
"""

from argparse import Namespace
from pathlib import Path

from minitri.cli.arguments import OneLineParser
from minitri.cli.exits import program
from minitri.errors import InputError, shorten
from tools.paper.item import Item, Table
from tools.paper.items import ITEMS
from tools.paper.lab import Lab
from tools.paper.report import write_item, write_report
from tools.paper.scale import SCALES
from tools.paper.study import Study
from tools.paper.texts import load_texts


def build_parser() -> OneLineParser:
    parser = OneLineParser(
        "paper",
        "table2 fig6a --out study --texts novels",
        "all --scale tiny --out study",
        description="Tables and figures of the paper on this machine, next to the published ones.",
    )
    parser.add_argument("items", nargs="*", metavar="ITEM", help="or all; without any: a list")
    parser.add_argument("--out", metavar="DIR", help="where cells and reports are kept")
    scales = ", ".join(SCALES)
    parser.add_argument("--scale", default="cpu", metavar="NAME", help=f"{scales} (default: cpu)")
    parser.add_argument("--model", help="instead of the scale's own, as for minitri.load")
    text = "folder or file of texts: PG-19, NarrativeQA, *.txt, *.parquet, *.jsonl (Python's help)"
    parser.add_argument("--texts", metavar="PATH", help=text)
    text = "measure again what was measured by another commit"
    parser.add_argument("--again", action="store_true", help=text)
    return parser


def chosen(names: list[str]) -> list[Item]:
    """The items of these names, in the paper's order. Raises `InputError`."""
    known = {item.name: item for item in ITEMS}
    for name in names:
        if name not in known and name != "all":
            listed = ", ".join(known)
            raise InputError(f"there is no item {shorten(name, 40)}; give all, or of {listed}")
    return [item for item in ITEMS if "all" in names or item.name in names]


def listing() -> str:
    """What there is, with the command and the time of each."""
    rows = []
    for item in ITEMS:
        minutes = [f"{it:g}" for it in (item.minutes_here, item.minutes_gpu)]
        rows.append([item.title, f"python -m tools.paper {item.name}", *minutes])
    columns = ("Figure", "Command", "Time here, min", "Time on a GPU, min (reckoned)")
    return Table(columns, rows).markdown()


def run_command(args: Namespace) -> None:
    """Does what the flags say. Raises `InputError`."""
    if not args.items:
        print(listing())
        return
    items = chosen(args.items)
    if args.scale not in SCALES:
        known = ", ".join(SCALES)
        raise InputError(f"--scale is {shorten(args.scale, 40)}; give one of {known}")
    if args.out is None:
        raise InputError("--out is missing; give a folder for cells and reports")
    scale = SCALES[args.scale]
    lab = Lab(scale, load_texts(args.texts, scale.num_texts), args.model)
    study = Study(Path(args.out), lab, args.again)
    for number, item in enumerate(items):
        study.measure(item, items[number + 1 :])
        write_item(study, item)
    write_report(study, listing())


main = program(build_parser, run_command)

if __name__ == "__main__":
    main()
