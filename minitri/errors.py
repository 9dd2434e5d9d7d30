"""The one exception for bad input.

Its message is a single line with three parts: what is wrong, what was got, and what to do. The command line prints
it and exits with code 2; a program that embeds the engine catches `InputError` (a `ValueError`). Everything else that
escapes from minitri is a bug.
"""


class InputError(ValueError):
    """Bad input from the user: a file, a flag, a prompt. The message is one line: what, what was got, what to do."""


def shorten(text: object, limit: int = 200) -> str:
    """One line of at most `limit` characters, for quoting somebody else's error message inside ours."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
