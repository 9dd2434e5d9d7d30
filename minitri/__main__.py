"""The command `minitri`, the same as `python -m minitri`: one of the programs, or a text to go on.

Imports next to nothing, so that its help is there at once.
"""

import sys
from importlib import import_module

from minitri import __version__
from minitri.apps.cli.exits import clean_exits
from minitri.core.errors import InputError

HELP = """usage: minitri TEXT | minitri PROGRAM ... | ... | minitri

  generate  a text goes on; what begins with none of these words is for it
  chat      questions and answers, about documents if you like
  serve     the endpoints of OpenAI's API on this machine
  plan      what fits on a GPU or this machine, and how fast it can be
  bench     speed of every method on this machine
  selftest  does speculation change the text on your weights?
  audit     is the sampling of an OpenAI-compatible server lossless?
  score     how likely does the model find a text? Log-probabilities, perplexity
  pull      fetch a model before it is needed; list, remove: the models on this disk

examples:
  minitri "The sea was" -n 40           40 tokens more, by the default model
  minitri -m llama3.2-1b < novel.txt    a prompt from a file or a pipe
  minitri generate --help               all flags of a program
  minitri --list-models                 the models that have names; --version: of minitri
"""
ON_DISK = ("pull", "list", "remove")
FOLDERS = ("chat", "serve", "selftest", "audit")
PROGRAMS = ("generate", "plan", "bench", "score", *FOLDERS, *ON_DISK)


def main(argv: list[str] | None = None) -> None:
    """Entry point of `minitri` and `python -m minitri`."""
    argv = sys.argv[1:] if argv is None else argv
    with clean_exits():
        is_lost = not argv and sys.stdin.isatty()
        if is_lost or argv in (["-h"], ["--help"], ["help"]):
            print(HELP, end="")
            sys.exit()
        if argv == ["--version"]:
            print("minitri", __version__)
            sys.exit()
        check_words(argv)
    name = argv.pop(0) if argv and argv[0] in PROGRAMS else "generate"
    if name in ON_DISK:
        import_module("minitri.apps.cli.on_disk").PROGRAMS[name](argv)
    home = {"generate": "generate", "score": "apps.cli.scoring"}.get(name, f"apps.{name}")
    import_module(f"minitri.{home}" + ".__main__" * (name in FOLDERS)).main(argv)


def check_words(argv: list[str]) -> None:
    """Raises `InputError` for the name of a program misspelled."""
    if argv and argv[0].isalpha() and argv[0] not in PROGRAMS:
        from difflib import get_close_matches  # imports re

        word = argv[0].lower()
        swapped = [name for name in PROGRAMS if sorted(name) == sorted(word)]  # as in chta
        for name in swapped or get_close_matches(word, PROGRAMS, 1, 0.8):
            advice = f"did you mean {name}? For a text: minitri generate {argv[0]}"
            raise InputError(f"there is no program {argv[0]}; {advice}")


if __name__ == "__main__":
    main()
