"""What a run did and how long it took: plain numbers, live while the run goes on. Nothing here prints."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from minitri.gpu.graphs import GraphPool

FORGETTING = 0.97
"""What is left, after each verdict about a row, of what the verdicts before it said about acceptance."""
SMOOTHING = 0.8
"""Weight of the past in the moving average of a round's time."""
SLOPE = 0.04
"""By how much one more guess makes a round slower, where no two lengths that were measured say it."""


class Recent:
    """What a level did lately: whose guesses it accepted, and what its rounds cost."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self.guesses: dict[str, tuple[float, float]] = {}
        """Per stage that guessed: tested and accepted guesses, older ones counting less."""
        self._seconds: dict[int, float] = {}  # of a round, by the number of guesses in it
        self._num_timed: dict[int, int] = {}
        self._last_timed: dict[int, int] = {}
        self._line: list[tuple[int, float]] = []  # what that comes to, rising

    def note(self, proposer: str | None, *, num_tested: int, num_accepted: int) -> None:
        """Notes a verdict about one row. No guess at all counts as one that was rejected."""
        if proposer is not None:
            tested, accepted = self.guesses.get(proposer, (0.0, 0.0))
            self.guesses[proposer] = (
                FORGETTING * tested + max(num_tested, 1), FORGETTING * accepted + num_accepted
            )  # fmt: skip

    def note_time(self, num_guesses: int, seconds: float) -> None:
        """Notes the time of a round."""
        self.num_rounds += 1
        times = self._num_timed[num_guesses] = self._num_timed.get(num_guesses, 0) + 1
        known = self._seconds.get(num_guesses, seconds)
        smoothed = (
            min(known, seconds) if times <= 3 else SMOOTHING * known + (1 - SMOOTHING) * seconds
        )
        self._seconds[num_guesses] = smoothed
        self._last_timed[num_guesses] = self.num_rounds
        self._fit()

    def scale_seconds(self, factor: float) -> None:
        """Expects rounds to take so many times as long from now on."""
        self._seconds = {
            num_guesses: factor * seconds for num_guesses, seconds in self._seconds.items()
        }
        self._fit()

    def _fit(self) -> None:
        """Fewer guesses never cost more: what says so was measured when the machine was slower, or faster, and what was
        measured later is right."""
        twice = [
            n for n, times in self._num_timed.items() if times > 1
        ]  # the first of a length may have been slow
        fitted: dict[int, float] = {}
        for n in sorted(twice or self._seconds, key=self._last_timed.__getitem__, reverse=True):
            least = max((seconds for other, seconds in fitted.items() if other < n), default=0.0)
            most = min(
                (seconds for other, seconds in fitted.items() if other > n), default=math.inf
            )
            fitted[n] = min(max(self._seconds[n], least), most)
        self._line = sorted(fitted.items())

    def seconds_of_round(self, num_guesses: float) -> float | None:
        """Of a round with so many guesses: on straight lines between those that were measured and beyond the most, by
        the usual slope below the fewest; None before the first."""
        if not self._line:
            return None
        (fewest, seconds), *more = self._line
        if not more or num_guesses < fewest:
            return seconds * max(0.5, 1 + SLOPE * (num_guesses - fewest))
        after = max(
            next((i for i, (n, _) in enumerate(self._line) if n >= num_guesses), len(more)), 1
        )
        (left, low), (right, high) = self._line[after - 1 : after + 1]
        return low + (high - low) / (right - left) * (num_guesses - left)


@dataclass
class LevelStats:
    """What one level of the cascade decided about the guesses of the stage below it, over all rows.

    Whole rounds are counted, the tokens of the last one that an end of the text cuts away included.
    """

    name: str
    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_tested_tokens: int = 0
    """Drafted tokens that were decided about: those behind a rejection are not."""
    num_accepted_tokens: int = 0
    tested_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    seconds: float = 0.0
    """In this level's own forward passes and verdicts, the stages below it not included."""
    recent: Recent = field(default_factory=Recent)

    def record(self, *, num_draft: int, num_accepted: int, proposer: str | None) -> None:
        """Notes one verdict about one row, on guesses of the stage named `proposer`."""
        num_tested = min(num_accepted + 1, num_draft)
        self.recent.note(proposer, num_tested=num_tested, num_accepted=num_accepted)
        self.num_rounds += 1
        self.num_draft_tokens += num_draft
        self.num_tested_tokens += num_tested
        self.num_accepted_tokens += num_accepted
        missing = num_draft - len(self.tested_per_position)
        self.tested_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for i in range(num_tested):
            self.tested_per_position[i] += 1
            self.accepted_per_position[i] += i < num_accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of tested tokens, the paper's alpha; None before the first test."""
        return self.num_accepted_tokens / self.num_tested_tokens if self.num_tested_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per round, the level's own included: 1 + accepted / rounds; None before the first round."""
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else None

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "name": self.name,
            "num_rounds": self.num_rounds,
            "num_draft_tokens": self.num_draft_tokens,
            "num_tested_tokens": self.num_tested_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "tested_per_position": self.tested_per_position,
            "accepted_per_position": self.accepted_per_position,
        }


@dataclass
class Stats:
    """Counts and seconds of one run over a batch of prompts; seconds are those of the engine, not of its caller."""

    num_prompt_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_decoded_tokens: int = 0
    """Generated tokens less the first of each prompt, which comes from the prefill."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    rebuild_seconds: float = 0.0
    """Of decoding, spent on choosing retrieval caches anew, unless that is a part of verification: see `visit`."""
    commit_seconds: float = 0.0
    """Of decoding, spent on bringing committed tokens into the small caches."""
    num_rebuilds: int = 0
    """How often a retrieval cache was chosen, the first time, behind the prompt, included."""
    kv_cache_bytes: int = 0
    """Of all caches."""
    stages: list[LevelStats] = field(default_factory=list)
    """Every stage of the cascade, from the lowest upwards."""
    steps_per_plan: dict[str, int] = field(default_factory=dict)
    """How many steps were made in each way; more than one where something was left to choose."""
    graphs: GraphPool | None = None
    """What was captured as CUDA graphs, on a GPU."""
    budgets: list[int] = field(default_factory=list)
    """Tokens in the retrieval cache of each row at last, where there was something to choose."""
    break_even: float | None = None
    """Acceptance rate at which the last plan would be as fast as the target alone; None if that was not asked."""

    @property
    def levels(self) -> list[LevelStats]:
        """The stages that verify something, from the lowest upwards: all but the first."""
        return self.stages[1:]

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds of decoding per decoded token of the whole batch; None before the first."""
        return (
            1e3 * self.decode_seconds / self.num_decoded_tokens if self.num_decoded_tokens else None
        )

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens of the whole batch per second of decoding; None before the first."""
        return self.num_decoded_tokens / self.decode_seconds if self.num_decoded_tokens else None


def spread(values: list[float]) -> dict[str, float]:
    """Median and range, for tables of measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


class PrefillClock:
    """Foretells the rest of a prefill, whose time grows as a n + b n^2: n tokens of matmuls, n^2 / 2 of attention."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._marks: list[tuple[int, float]] = []  # (tokens done, seconds so far)

    def mark(self, num_done: int, seconds: float) -> float:
        """Notes progress; returns the seconds that probably remain."""
        if num_done == self._num_tokens:
            return 0.0
        self._marks.append((num_done, seconds))
        n1, t1 = self._marks[(len(self._marks) - 1) // 2]
        n2, t2 = num_done, seconds
        quadratic = max(0.0, (t2 / n2 - t1 / n1) / (n2 - n1)) if n2 > n1 else 0.0
        linear = t2 / n2 - quadratic * n2
        total = linear * self._num_tokens + quadratic * self._num_tokens**2
        return max(0.0, total - seconds)
