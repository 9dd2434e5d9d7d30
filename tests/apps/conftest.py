"""Ctrl-C at a chosen moment of a run."""

import itertools
import signal

import pytest

from minitri import Generation


@pytest.fixture
def interrupt(monkeypatch):
    """Sends Ctrl-C before the event of this number."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(number: int, times: int = 1) -> None:
        real, events = Generation.__next__, itertools.count(1)

        def following(run):
            if next(events) == number:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return real(run)

        monkeypatch.setattr(Generation, "__next__", following)

    yield interrupt
    signal.signal(signal.SIGINT, handler)  # at its end a program sets another
