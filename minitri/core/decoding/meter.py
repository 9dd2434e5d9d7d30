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
        self.clock = clock

    def round(
        self, level: LevelStats, num_guesses: int = 0, num_tokens: int = 1
    ) -> AbstractContextManager[None]:
        """Times a round of `level`: it verifies `num_guesses` per row, or samples `num_tokens`."""

        def take(seconds: float) -> None:
            level.seconds += seconds
            self.tuner.note_round(level.name, num_guesses, seconds / num_tokens)

        return self._timed(take)

    def updating_caches(self) -> AbstractContextManager[None]:
        """Times updates of the drafter's and the retrieval cache, as `Stats.commit_seconds`."""
        return self._timed(self.stats.note_commit)

    def note_acceptance(
        self, level: LevelStats, proposer: str | None, num_draft: int, num_accepted: int
    ) -> None:
        """Reports that `level` accepted `num_accepted` of one row's guesses by stage `proposer`."""
        num_tested = level.record(num_draft, num_accepted)
        if proposer is not None:
            # A proposal without guesses counts as one rejected guess: nothing was gained.
            self.tuner.note_acceptance(proposer, max(num_tested, 1), num_accepted)

    @contextmanager
    def _timed(self, take: Callable[[float], None]) -> Iterator[None]:
        started = self.clock.now()
        yield
        self.clock.since(started, take)
