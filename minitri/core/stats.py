"""Statistics of a run: counts and seconds, updated while the run goes on."""

import os.path
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from minitri.core.decoding.autotuner import Autotuner
from minitri.core.fields import brief

Tokens = list[int]  # ids of the tokens of a text
LogProbs = tuple[float, tuple[tuple[int, float], ...]]
"""Log-probability of a token; token ids and log-probabilities of the likeliest, best first."""


class Clock:
    """Measures the time of work on a CPU, where a call returns when its work is done."""

    @contextmanager
    def timed(self, take: Callable[[float], None]) -> Iterator[None]:
        """Context for work; calls `take` with its seconds, as soon as they are known."""
        started = time.perf_counter()
        yield
        take(time.perf_counter() - started)

    def settle(self) -> None:
        """Waits until the device has done all work, so that all seconds are known."""


@dataclass
class LevelStats:
    """Counts of one stage: its rounds, and its verdicts about guesses of the stage below."""

    __repr__ = brief
    name: str  # draft, retrieval or target
    num_rounds: int = 0  # verdicts, one per row; of a draft model that guesses, passes times rows
    num_draft_tokens: int = 0  # guesses of the stage below
    num_tested_tokens: int = 0  # guesses up to and with the first rejected one
    num_accepted_tokens: int = 0  # guesses before the first rejected one
    seconds: float = 0.0  # in its own forward passes and verdicts, without the stages below

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / tested tokens, the paper's alpha; None before the first test."""
        num_tested = self.num_tested_tokens
        return self.num_accepted_tokens / num_tested if num_tested else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per round with the level's own: 1 + accepted / rounds; None before the first."""
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else None

    def count(self, num_draft: int, num_accepted: int) -> int:
        """Counts a verdict about `num_draft` guesses of a row; returns how many were tested."""
        num_tested = min(num_accepted + 1, num_draft)
        self.num_rounds += 1
        self.num_draft_tokens += num_draft
        self.num_tested_tokens += num_tested
        self.num_accepted_tokens += num_accepted
        return num_tested

    def as_dict(self) -> dict[str, Any]:
        counts = {name: value for name, value in vars(self).items() if name != "seconds"}
        rates = ("acceptance_rate", "mean_acceptance_length")
        return counts | {name: getattr(self, name) for name in rates}


@dataclass
class RowStats:
    """Counts of one request's tokens."""

    __repr__ = brief
    num_prompt_tokens: int
    num_cached_tokens: int = 0  # prompt tokens whose K and V were reused
    num_generated_tokens: int = 0
    by_origin: Counter[str] = field(default_factory=Counter)  # generated tokens, by `Token.origin`


@dataclass
class Stats:
    """Counts and seconds of one run, without the time that the caller takes between events."""

    __repr__ = brief
    num_prompt_tokens: int = 0
    num_prefilled_tokens: int = 0  # prompt tokens whose K and V were computed, not reused
    num_generated_tokens: int = 0
    num_decoded_tokens: int = 0  # generated tokens after each text's first, which counts as prefill
    prefill_seconds: float = 0.0  # reading prompts and sampling first tokens
    decode_seconds: float = 0.0  # all steps
    num_rebuilds: int = 0  # of the retrieval cache, with the first build after the prompt
    kv_cache_bytes: int = 0  # all KV caches of the run
    stages: list[LevelStats] = field(default_factory=list)  # from the lowest upwards
    steps_per_plan: Counter[str] = field(default_factory=Counter)  # by `str(StepPlan)`

    @property
    def levels(self) -> list[LevelStats]:
        """Statistics of the stages that verify guesses: all but the lowest."""
        return self.stages[1:]

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per decoded token of all rows together; None before the first."""
        num = self.num_decoded_tokens
        return 1e3 * self.decode_seconds / num if num else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens of all rows together per second of decoding; None before the first."""
        return 1e3 / self.ms_per_token if self.ms_per_token else None


@dataclass
class Meter:
    """Statistics and autotuner that a run's stages report to, and the clock that times them."""

    stats: Stats
    tuner: Autotuner
    clock: Clock


def num_common(tokens: Tokens, prompt: Tokens) -> int:
    """Length of the common beginning of two texts, in tokens."""
    return len(os.path.commonprefix((tokens, prompt)))  # noqa: RUF071
