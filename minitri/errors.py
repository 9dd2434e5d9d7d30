"""The one exception for bad input: its message is a single line.

It says what is wrong, what was got and what to do. The programs print it and exit with code 2; a
program that embeds the engine catches `InputError`. Whatever else escapes from minitri is a bug.
"""


class InputError(ValueError):
    """Bad input: a file, a flag, a setting, a prompt."""


def shorten(text: object, limit: int = 200) -> str:
    """One line of at most `limit` characters, to quote another error message inside ours."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
