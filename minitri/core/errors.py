"""Exceptions of minitri, with messages of one line: what is wrong, what was got, what to do.
Programs print an `InputError` and exit with code 2; others are bugs, or the system's errors."""

from collections.abc import Iterator
from contextlib import contextmanager

MAX_COUNT = 2**31 - 1


class InputError(ValueError):
    """Bad input: a wrong file, flag, setting or prompt. Remedies, `ways`, end the message.
    Programs show a setting, `budget=30`, as a flag, and leave out `ways` whose flag they lack."""

    def __init__(self, message: str, *ways: str) -> None:
        super().__init__(message + "; " * bool(ways) + " or ".join(ways))
        self.message = message
        self.ways = ways


class FaultError(InputError):
    """Failure of a valid request on this machine, or at this time; a server answers 5xx."""


class NotFiniteError(ArithmeticError):
    """Logits or next-token distributions of a row of the batch are not finite.
    The message is empty, or says why the row's grammar failed, which makes the logits NaN."""


def shorten(text: object, limit: int = 200) -> str:
    """Cuts a text to one line of at most `limit` characters without control characters."""
    words = " ".join(str(text)[: 10 * limit].split())
    line = "".join(char if char.isprintable() else "\ufffd" for char in words)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def check_unicode(text: str, what: str) -> None:
    """Raises `InputError` for lone surrogates (bytes not UTF-8) in `text`, described by `what`."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"character {error.start}"
        raise InputError(f"{what} is not valid Unicode ({where}); give it as UTF-8") from None


@contextmanager
def explain(problem: str, advice: str = "get it again") -> Iterator[None]:
    """Context that turns an exception, if no `InputError`, into one: "PROBLEM (WHY); ADVICE"."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # libraries raise all kinds over damaged files
        reason = str(error) if isinstance(error, ValueError) else getattr(error, "strerror", "")
        kind = "it lacks" if type(error) is KeyError else f"{type(error).__name__}:"
        reason = reason or f"{kind} {error}"
        raise InputError(f"{problem} ({shorten(reason, 140)}); {advice}") from error
