"""The one exception for bad input, whose message is a single line, and checks that raise it.

It says what is wrong, what was got and what to do. The programs print it and exit with code 2; a
program that embeds the engine catches `InputError`. Whatever else escapes from minitri is a bug.
"""

MAX_COUNT = 2**31 - 1
AT_LEAST_1 = "a whole number of at least 1 (and below 2^31)"


class InputError(ValueError):
    """Bad input: a file, a flag, a setting, a prompt."""


def shorten(text: object, limit: int = 200) -> str:
    """One line of at most `limit` characters, to quote another error message inside ours."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def is_number(value: object, least: float, most: float) -> bool:
    """Whether a setting is a number, and neither too small nor too large."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return least <= value <= most


def is_count(value: object, least: int = 1, most: float = MAX_COUNT) -> bool:
    """Whether a setting is a whole number, and neither too small nor too large."""
    return isinstance(value, int) and is_number(value, least, most)


def require(settings: object, name: str, ok: bool, wanted: str) -> None:
    """Raises `InputError` about a field unless its value is right."""
    if not ok:
        value = shorten(repr(getattr(settings, name)), 60)
        raise InputError(f"{name} is {value}; it must be {wanted}")


def require_switches(settings: object, *names: str) -> None:
    """Raises `InputError` unless these fields are True or False."""
    for name in names:
        require(settings, name, isinstance(getattr(settings, name), bool), "True or False")


def check_unicode(text: str, what: str) -> None:
    """Raises `InputError` for lone surrogates: bytes on a command line that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} is not valid Unicode (character {error.start}); give it as UTF-8"
        ) from None
