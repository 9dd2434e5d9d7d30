"""Errors of bad input: one line in parts, what is wrong and what to do, that names the place."""

import contextlib
from collections.abc import Iterator

import pytest

from minitri.core.errors import InputError


def check_parts(message: str) -> None:
    """Asserts that a message is one line of moderate length that ends with advice."""
    assert message.isprintable(), message
    assert len(message) < 1000, message
    assert "; " in message, message


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    """A block that ends with an error whose message has these words."""
    with pytest.raises(InputError) as caught:
        yield
    message = str(caught.value)
    check_parts(message)
    assert all(word in message for word in words), message
