"""The one exception for bad input; its message is a line: what is wrong, what was got, what to do.

Programs print it and exit with code 2. Whatever else escapes from minitri is a bug.
"""

from collections.abc import Iterator
from contextlib import contextmanager

MAX_COUNT = 2**31 - 1


class InputError(ValueError):
    """Bad input: a file, a flag, a setting, a prompt.

    Settings are spelled as parameters, such as `budget=30`, or the message begins with `budget is`.
    `ways` out of it come last; a program leaves out those that it does not have, see `in_flags`.
    """

    def __init__(self, message: str, *ways: str) -> None:
        choice = " or ".join(filter(None, (", ".join(ways[:-1]), *ways[-1:])))
        super().__init__("; ".join(filter(None, (message, choice))))
        self.message = message
        self.ways = ways


class FaultError(InputError):
    """The input is sound, but it cannot be computed here, or not now; a server answers 5xx."""


class NotFiniteError(ArithmeticError):
    """A distribution is not finite: the weights are damaged, or overflow their dtype; or a grammar
    has none, as the message says then."""


def shorten(text: object, limit: int = 200) -> str:
    """One line of at most `limit` characters, to quote a file or another error in a message of
    ours; a control character could move the cursor."""
    words = str(text)[: 10 * limit].split()
    printable = (char if char.isprintable() else "\ufffd" for char in " ".join(words))
    line = "".join(printable)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def check_unicode(text: str, what: str) -> None:
    """Raises `InputError` for lone surrogates: bytes on a command line that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} is not valid Unicode (character {error.start}); give it as UTF-8"
        ) from None


@contextmanager
def explain(problem: str, advice: str = "get it again") -> Iterator[None]:
    """Turns whatever goes wrong into one line: `problem (what the error says); advice`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # libraries raise all kinds over damaged files
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        elif type(error) is ValueError and str(error):
            reason = str(error)
        raise InputError(f"{problem} ({shorten(reason, 140)}); {advice}") from error
