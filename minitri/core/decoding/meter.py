"""The meter: times the rounds of a cascade, for its statistics and for the autotuner.

What a round took is known at once on a CPU, on a GPU when the device has done it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from minitri.core.decoding.autotuner import Autotuner
from minitri.core.stats import Clock, LevelStats, Stats


class Meter:
    """Seconds and counts of one run, given to its statistics and its autotuner."""

    def __init__(self, stats: Stats, tuner: Autotuner, clock: Clock) -> None:
        self.stats = stats
        self.tuner = tuner
        self._clock = clock

    def round(
        self, level: LevelStats, num_guesses: int = 0, num_tokens: int = 1
    ) -> AbstractContextManager[None]:
        """Reads at most `num_guesses` per row, to verify them or to guess `num_tokens` more."""

        def take(seconds: float) -> None:
            level.seconds += seconds
            self.tuner.note_round(level.name, num_guesses, seconds / num_tokens)

        return self._timed(take)

    def catching_up(self, level: LevelStats) -> AbstractContextManager[None]:
        """A stage gets ready for a step."""
        return self._timed(lambda seconds: self.tuner.note_catching_up(level.name, seconds))

    def commit(self) -> AbstractContextManager[None]:
        """The small caches are brought up to date."""
        return self._timed(self.stats.note_commit)

    def note_acceptance(
        self, level: LevelStats, proposer: str | None, num_draft: int, num_accepted: int
    ) -> None:
        """What `level` accepted of one row's guesses; `proposer` is who guessed, if anyone."""
        num_tested = level.record(num_draft, num_accepted)
        if proposer is not None:
            # No guess at all counts as one that was rejected: nothing was gained.
            self.tuner.note_acceptance(proposer, max(num_tested, 1), num_accepted)

    def settle(self) -> None:
        """Waits until all that is timed is done."""
        self._clock.settle()

    @contextmanager
    def _timed(self, take: Callable[[float], None]) -> Iterator[None]:
        started = self._clock.now()
        yield
        self._clock.since(started, take)
