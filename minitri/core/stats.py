"""What a run did and how long it took: plain numbers, live while the run goes on."""

import os.path
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minitri.core.fields import brief

LogProbs = tuple[float, tuple[tuple[int, float], ...]]
"""Of a token; and of the likeliest ones at its place, the best first."""


class Clock:
    """The host's clock, for a device that has done its work when a call returns."""

    def now(self) -> Any:
        return time.perf_counter()

    def since(self, start: Any, take: Callable[[float], None]) -> None:
        """Gives `take` the seconds from a mark until now: at once, or when they are known."""
        take(time.perf_counter() - start)

    def settle(self) -> None:
        """Waits until the device has done all that is timed, and gives out the seconds."""


@dataclass
class LevelStats:
    """What one level decided about the guesses of the stage below it, in whole rounds."""

    __repr__ = brief
    name: str
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_tested_tokens: int = 0
    """Drafted tokens that were decided about: those after a rejection are not."""
    num_accepted_tokens: int = 0
    seconds: float = 0.0
    """In this level's own forward passes and verdicts, without the stages below."""

    def record(self, num_draft: int, num_accepted: int) -> int:
        """Counts one verdict about one row; returns how many guesses were tested."""
        num_tested = min(num_accepted + 1, num_draft)
        self.num_rounds += 1
        self.num_draft_tokens += num_draft
        self.num_tested_tokens += num_tested
        self.num_accepted_tokens += num_accepted
        return num_tested

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of tested tokens, the paper's alpha; None before the first test."""
        tested = self.num_tested_tokens
        return self.num_accepted_tokens / tested if tested else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per round, the level's own included: 1 + accepted / rounds; None before any."""
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else None

    def as_dict(self) -> dict[str, Any]:
        counts = {name: value for name, value in vars(self).items() if name != "seconds"}
        counts["acceptance_rate"] = self.acceptance_rate
        counts["mean_acceptance_length"] = self.mean_acceptance_length
        return counts


@dataclass
class RowStats:
    """What became of one request."""

    __repr__ = brief
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    """Tokens of the prompt that were not read, because their K and V were there."""
    num_generated_tokens: int = 0
    by_origin: Counter[str] = field(default_factory=Counter)
    """Generated tokens by where they came from, see `Token.origin`."""


@dataclass
class Stats:
    """Counts and seconds of one run over a batch of prompts; the caller's own time is not in."""

    __repr__ = brief
    num_prompt_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_decoded_tokens: int = 0
    """Generated tokens less the first of each prompt, which comes from the prefill."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    commit_seconds: float = 0.0
    """Of decoding: updates and rebuilds of the small caches outside a verification pass."""
    num_rebuilds: int = 0
    """Of the retrieval cache, the first build after the prompt included."""
    kv_cache_bytes: int = 0
    stages: list[LevelStats] = field(default_factory=list)
    """Every stage of the cascade, from the lowest upwards."""
    steps_per_plan: Counter[str] = field(default_factory=Counter)
    """Steps made by each plan (method and gammas); more than one where something was open."""
    num_graphs: int = 0
    """CUDA graphs that were captured for this run."""

    def note_commit(self, seconds: float) -> None:
        self.commit_seconds += seconds

    @property
    def levels(self) -> list[LevelStats]:
        """The stages that verify something, from the lowest upwards: all but the first."""
        return self.stages[1:]

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per decoded token of the whole batch; None before the first."""
        tokens = self.num_decoded_tokens
        return 1e3 * self.decode_seconds / tokens if tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens of the whole batch per second of decoding; None before the first."""
        tokens = self.num_decoded_tokens
        return tokens / self.decode_seconds if tokens else None


def num_common(tokens: list[int], prompt: list[int]) -> int:
    """Tokens that two texts begin with."""
    return len(os.path.commonprefix((tokens, prompt)))  # noqa: RUF071
