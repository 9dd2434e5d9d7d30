"""What a library raises over a damaged file becomes an `InputError`."""

from collections.abc import Iterator
from contextlib import contextmanager

from minitri.errors import InputError, shorten


def printable(text: object, limit: int = 200) -> str:
    """`shorten`, for texts that come from files: a control character could move the cursor."""
    return "".join(char if char.isprintable() else "\ufffd" for char in shorten(text, limit))


@contextmanager
def explain(
    problem: str, *errors: type[Exception], advice: str = "download it again", limit: int = 200,
    with_type: bool = False,
) -> Iterator[None]:  # fmt: skip
    """Turns any of these errors into `problem (what the error says); advice`."""
    try:
        yield
    except InputError:
        raise
    except errors as error:
        kind = f"{type(error).__name__}: " if with_type else ""
        raise InputError(f"{problem} ({kind}{printable(error, limit)}); {advice}") from None
