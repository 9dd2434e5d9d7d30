"""Exceptions of minitri, with messages of one line: what is wrong, what was got, what to do.
Programs print an `InputError` and exit with 2; others, but for the system's errors, are bugs."""

from collections.abc import Iterator
from contextlib import contextmanager

MAX_COUNT = 2**31 - 1


class InputError(ValueError):
    """Bad input: a wrong file, flag, setting or prompt. `ways` are remedies, added at the end.
    Programs show a setting, `budget=30`, as a flag, and leave out ways whose flag they lack."""

    def __init__(self, message: str, *ways: str) -> None:
        choice = " or ".join(filter(None, (", ".join(ways[:-1]), *ways[-1:])))
        super().__init__("; ".join(filter(None, (message, choice))))
        self.message = message
        self.ways = ways


class FaultError(InputError):
    """Failure of a valid request on this machine, or at this time; a server answers 5xx."""


class NotFiniteError(ArithmeticError):
    """Error: logits or distributions of a row are not finite.
    Its message is empty, or says why the row's grammar failed, which makes its logits NaN."""


def shorten(text: object, limit: int = 200) -> str:
    """Cuts a text to one line of at most `limit` characters without control characters."""
    words = " ".join(str(text)[: 10 * limit].split())
    line = "".join(char if char.isprintable() else "\ufffd" for char in words)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def check_unicode(text: str, what: str) -> None:
    """Raises `InputError`, which names the text `what`, for lone surrogates (bytes not UTF-8)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"character {error.start}"
        raise InputError(f"{what} is not valid Unicode ({where}); give it as UTF-8") from None


@contextmanager
def explain(problem: str, advice: str = "get it again") -> Iterator[None]:
    """Context that turns any exception into an `InputError`: `problem (its message); advice`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # libraries raise all kinds over damaged files
        reason = str(error) if type(error) is ValueError else getattr(error, "strerror", "")
        kind = "it lacks" if type(error) is KeyError else f"{type(error).__name__}:"
        reason = reason or f"{kind} {error}"
        raise InputError(f"{problem} ({shorten(reason, 140)}); {advice}") from error
