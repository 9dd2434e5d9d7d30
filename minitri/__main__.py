"""The command `minitri`, or `python -m minitri`: runs a program, or continues a text.

Imports next to nothing, so that its help is there at once."""

import os
import sys
from importlib import import_module

from minitri import __version__
from minitri.apps.cli.exits import clean_exits
from minitri.core.errors import InputError

with open(f"{os.path.dirname(__file__)}/apps/help.txt", encoding="utf-8") as file:  # noqa: PTH120, PTH123
    HELP = file.read().partition("\nminitri ")[0]
PROGRAMS = {  # name of a program: its module in minitri, which has a `main`
    "generate": "generate",
    "plan": "apps.plan",
    "chat": "apps.chat.chatting",
    "serve": "apps.serve.serving",
    "selftest": "apps.selftest.selftesting",
    "score": "apps.cli.scoring",
}


def main(argv: list[str] | None = None) -> None:
    """Runs the program that `argv` names first, else `generate`; None: the command line's words."""
    argv = sys.argv[1:] if argv is None else argv
    with clean_exits():
        if argv in (["-h"], ["--help"], ["help"]) or (not argv and sys.stdin.isatty()):
            print(HELP, end="")
            sys.exit()
        if argv == ["--version"]:
            print("minitri", __version__)
            sys.exit()
        word = argv[0] if argv else ""
        if word not in PROGRAMS and word[:1] != "-" and word.replace("-", "").isalpha():
            from difflib import get_close_matches  # imports re

            for name in get_close_matches(word.lower(), PROGRAMS, 1, 0.75):
                advice = f"did you mean {name}? For a text: minitri generate {word}"
                raise InputError(f"there is no program {word}; {advice}")
        name = argv.pop(0) if word in PROGRAMS else "generate"
        run = import_module(f"minitri.{PROGRAMS[name]}").main
    run(argv)


if __name__ == "__main__":
    main()
