"""Times the stages of speculative decoding, for statistics and for the autotuner."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from minitri.core.decoding.autotuner import Autotuner
from minitri.core.stats import Clock, LevelStats, Stats


class Meter:
    """Reports seconds and counts of one run to its statistics and its autotuner."""

    def __init__(self, stats: Stats, tuner: Autotuner, clock: Clock) -> None:
        self.stats = stats
        self.tuner = tuner
        self._clock = clock

    def round(
        self, level: LevelStats, num_guesses: int = 0, num_tokens: int = 1
    ) -> AbstractContextManager[None]:
        """Times a round that verifies up to `num_guesses` per row, or samples `num_tokens`."""

        def take(seconds: float) -> None:
            level.seconds += seconds
            self.tuner.note_round(level.name, num_guesses, seconds / num_tokens)

        return self._timed(take)

    def catching_up(self, level: LevelStats) -> AbstractContextManager[None]:
        """Times how a stage prepares for a step."""
        return self._timed(lambda seconds: self.tuner.note_catching_up(level.name, seconds))

    def commit(self) -> AbstractContextManager[None]:
        """Times updates of the small caches."""
        return self._timed(self.stats.note_commit)

    def note_acceptance(
        self, level: LevelStats, proposer: str | None, num_draft: int, num_accepted: int
    ) -> None:
        """Reports how many of one row's guesses, made by the stage `proposer`, were accepted."""
        num_tested = level.record(num_draft, num_accepted)
        if proposer is not None:
            # A proposal without guesses counts as one rejected guess: nothing was gained.
            self.tuner.note_acceptance(proposer, max(num_tested, 1), num_accepted)

    def settle(self) -> None:
        """Waits until the device has finished all that is timed."""
        self._clock.settle()

    @contextmanager
    def _timed(self, take: Callable[[float], None]) -> Iterator[None]:
        started = self._clock.now()
        yield
        self._clock.since(started, take)
