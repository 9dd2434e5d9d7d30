"""What a library raises over a damaged file becomes an `InputError`."""

from collections.abc import Iterator
from contextlib import contextmanager

from minitri.errors import InputError, shorten


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
        raise InputError(f"{problem} ({kind}{shorten(error, limit)}); {advice}") from None
