"""Measurements by name; each has --help.

python -m tools.bench compare      all methods on this machine, next to autoregressive decoding
python -m tools.bench methods      one method or several by themselves
python -m tools.bench auto         what speculation gains in forty settings
python -m tools.bench people       what people meet, next to other engines
python -m tools.bench synthetic    a shape with made-up weights and verdicts
"""

import sys

from minitri.apps.cli.exits import clean_exits
from minitri.core.errors import InputError, shorten
from tools.bench import auto, compare, people, synthetic

PROGRAMS = {
    "compare": compare.main,
    "methods": compare.methods,
    "auto": auto.main,
    "people": people.main,
    "synthetic": synthetic.main,
}


def main(argv: list[str] | None = None) -> None:
    """Runs the measurement that the first word names."""
    name, *words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    with clean_exits():
        if name in ("-h", "--help"):
            print(__doc__, end="")
            sys.exit()
        if name not in PROGRAMS:
            known = ", ".join(PROGRAMS)
            raise InputError(f"there is no measurement {shorten(name, 40)}; give one of {known}")
    PROGRAMS[name](words)


if __name__ == "__main__":
    main()
