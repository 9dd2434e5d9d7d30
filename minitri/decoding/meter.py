"""The meter: times the rounds of a cascade, for its statistics and for the autotuner.

The algorithm says what it does (`with meter.round(...)`); what that took is known at once on a CPU,
on a GPU when the device has done it. Nothing here decides anything.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from minitri.decoding.autotuner import Autotuner
from minitri.stats import Clock, LevelStats, Stats


class Meter:
    """Seconds and counts of one run, given to its statistics and its autotuner."""

    def __init__(self, stats: Stats, tuner: Autotuner, clock: Clock | None = None) -> None:
        self._stats = stats
        self._tuner = tuner
        self.clock = clock or Clock()

    @contextmanager
    def drafting(self, level: LevelStats, num_rows: int, num_before: int = 0) -> Iterator[None]:
        """A pass that guesses a token of each row, after `num_before` others in its block."""
        started = self.clock.now()
        yield
        self.clock.since(started, partial(self._note_round, level, num_before))
        for _ in range(num_rows):
            level.record(0, 0)

    @contextmanager
    def round(self, level: LevelStats, num_guesses: int) -> Iterator[None]:
        """A round that verifies at most `num_guesses` per row; the host has waited for it."""
        started = self.clock.now()
        yield
        self.clock.settle()
        self.clock.since(started, partial(self._note_round, level, num_guesses))

    @contextmanager
    def catching_up(self, level: LevelStats) -> Iterator[None]:
        """A stage gets ready for a step."""
        started = self.clock.now()
        yield
        self.clock.since(started, partial(self._tuner.note_catching_up, level.name))

    @contextmanager
    def commit(self) -> Iterator[None]:
        """The small caches are brought up to date."""
        started = self.clock.now()
        yield
        self.clock.since(started, self._stats.note_commit)

    def note_verdict(
        self, level: LevelStats, proposer: str | None, num_draft: int, num_accepted: int
    ) -> None:
        """A verdict of `level` about one row; `proposer` is the stage that guessed, if any."""
        num_tested = level.record(num_draft, num_accepted)
        if proposer is not None:
            # No guess at all counts as one that was rejected: nothing was gained.
            self._tuner.note_acceptance(proposer, max(num_tested, 1), num_accepted)

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Commits of the block are not counted: they belong to a prefill."""
        self.settle()
        before = self._stats.commit_seconds
        yield
        self.settle()
        self._stats.commit_seconds = before

    def settle(self) -> None:
        """Waits until all that is timed is done."""
        self.clock.settle()

    def _note_round(self, level: LevelStats, num_guesses: int, seconds: float) -> None:
        level.seconds += seconds
        self._tuner.note_round(level.name, num_guesses, seconds)
