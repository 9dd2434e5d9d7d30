"""A level of the cascade (`cascade.py`): what verifies the stage below it and proposes to the one
above; and the protocols of stages and of runners, models with a cache.

Legend: B rows, N proposed tokens, V vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from minitri.decoding.autotuner import Autotuner
from minitri.decoding.random_source import RandomSource
from minitri.decoding.verification import NotFiniteError, Proposal, Verdict
from minitri.stats import Clock, LevelStats


@dataclass(frozen=True)
class Emitted:
    """The tokens that a round added to a row, and where each of them came from."""

    tokens: list[int]
    origins: list[str]
    """The stage that guessed the token (`draft`, `retrieval`), or `recovered` or `bonus`."""


class Follower(Protocol):
    """Something that follows the texts as they grow: a stage of the cascade, or a runner."""

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """Called before a step that uses it, when all `sequences` are certain."""

    def crop(self, lengths: list[int]) -> None:
        """Drops what it knows of row b behind the first `lengths[b]` tokens: it was rejected."""

    def reset(self, b: int) -> None:
        """Drops all that it knows of row b."""


class Stage(Follower, Protocol):
    """Something that proposes tokens: a `Level`, or a drafter without a model."""

    stats: LevelStats
    gamma: int
    """Tokens to collect for a proposal; the last round may overshoot it."""

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Guesses the next tokens of the active rows; leaves `sequences` as they were."""

    def switch_off(self) -> None:
        """Called where its distributions were not finite: it must guess no more."""


class Runner(Follower, Protocol):
    """A model with a cache, as a level sees it; see `runner.py`."""

    def next_probs(
        self, sequences: list[list[int]], active: list[bool], guesses: Proposal | None = None
    ) -> Tensor:
        """Distributions behind each row's last token and each of the guesses behind it, in order.

        Shape (B, N + 1, V). Reads what the cache has not seen of the active rows; rows that are not
        active get numbers that mean nothing.
        """

    def next_probs_behind(self, tokens_B: Tensor, active: list[bool]) -> Tensor:
        """Reads one more token of each active row, which the host need not know: (B, V)."""

    def commit(self, emitted: list[Emitted], active: list[bool], *, has_guessed: bool) -> None:
        """Called after every step with what became certain. `has_guessed`: whether the guesses
        that were verified came from this runner."""


class Level:
    """One level of the cascade: verifies the stage below it, proposes to the level above."""

    def __init__(
        self, runner: Runner, source: RandomSource, stats: LevelStats, tuner: Autotuner,
        on_not_finite: Callable[[], None] | None = None,
        clock: Clock = Clock(),  # noqa: B008 (it holds nothing)
    ) -> None:  # fmt: skip
        """`on_not_finite` makes this level optional: where its distributions are not finite it is
        called, and the level proposes nothing any more."""
        self.runner = runner
        self.stats = stats
        self.below: Stage | None = None  # like gamma, set before every step: see `Cascade`
        self.gamma = 1
        self._source = source
        self._tuner = tuner
        self._on_not_finite = on_not_finite
        self._clock = clock
        self._is_off = False

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Runs rounds until every active row has a block of at least `gamma` tokens."""
        if self.below is None:
            return self._draft(sequences, active)
        starts = [len(sequence) for sequence in sequences]
        probs: list[list[Tensor]] = [[] for _ in sequences]
        origins: list[list[str]] = [[] for _ in sequences]
        unfinished = active
        while any(unfinished):
            emitted, probs_BNV = self.round(sequences, unfinished)
            for b, row in enumerate(emitted):
                probs[b].append(probs_BNV[b, : len(row.tokens)])
                origins[b] += [*row.origins[:-1], self.stats.name] if row.tokens else []
            unfinished = [
                on and len(row) < self.gamma for on, row in zip(active, origins, strict=True)
            ]
        blocks = [sequence[start:] for sequence, start in zip(sequences, starts, strict=True)]
        for sequence, start in zip(sequences, starts, strict=True):
            del sequence[start:]
        rows = [torch.cat(row) for row in probs]
        return Proposal.of(blocks, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), origins)

    def _draft(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Guesses `gamma` tokens of every active row, one behind the other, on the device."""
        B, tokens, probs = len(sequences), list[Tensor](), list[Tensor]()
        if self._is_off:
            return Proposal.nothing(B)
        for i in range(self.gamma):
            started = self._clock.now()
            if i == 0:
                probs.append(self.runner.next_probs(sequences, active).squeeze(1))
            else:
                probs.append(self.runner.next_probs_behind(tokens[-1], active))
            positions = [len(sequence) + i for sequence in sequences]
            tokens.append(self._source.sample(probs[-1], positions, active))
            self._record_draft(0, active, started)
        counts = [self.gamma if on else 0 for on in active]
        origins = [[self.stats.name] * count for count in counts]
        return Proposal(counts, torch.stack(tokens, 1), torch.stack(probs, 1), origins)

    def switch_off(self) -> None:
        """Its distributions are not finite. It proposes nothing any more, if it is optional."""
        if self._on_not_finite is None:
            raise NotFiniteError
        self._on_not_finite()
        self._is_off = True

    def round(
        self, sequences: list[list[int]], active: list[bool], guessing: list[bool] | None = None
    ) -> tuple[list[Emitted], Tensor]:
        """Lets the stage below guess, for the rows that are `guessing` (None: for all active ones),
        and verifies its guesses; returns what `verify` does."""
        guessing = active if guessing is None else guessing
        if self.below is None or not any(guessing):
            proposal = Proposal.nothing(len(sequences))
        else:
            proposal = self.below.propose(sequences, guessing)
        started = self._clock.now()
        emitted, probs_BNV = self.verify(sequences, active, proposal)
        self._clock.settle()
        self._record(proposal, emitted, started, guessing)
        return emitted, probs_BNV

    def verify(
        self, sequences: list[list[int]], active: list[bool], proposal: Proposal
    ) -> tuple[list[Emitted], Tensor]:
        """Verifies a proposal in one forward pass and appends the outcome to the active rows.

        Returns what was appended, and the distributions (B, N + 1, V) of this level, of which the
        tokens appended to row b follow the first ones.
        """
        starts = [len(sequence) for sequence in sequences]
        probs_BNV = self.runner.next_probs(sequences, active, proposal)
        verdict = self._source.verify(proposal, probs_BNV, starts, active)
        rows = enumerate(active)
        emitted = [_emitted(proposal, verdict, b) if on else Emitted([], []) for b, on in rows]
        for sequence, new in zip(sequences, emitted, strict=True):
            sequence += new.tokens
        self.crop([start + n for start, n in zip(starts, verdict.num_accepted, strict=True)])
        if verdict.is_damaged:
            assert self.below is not None
            self.below.switch_off()
        return emitted, probs_BNV

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        if not self._is_off:
            started = self._clock.now()
            self.runner.prepare(sequences, active)
            self._clock.since(started, partial(self._tuner.note_catching_up, self.stats.name))

    def crop(self, lengths: list[int]) -> None:
        """Drops what was rejected, here and in the stages below."""
        self.runner.crop(lengths)
        if self.below is not None:
            self.below.crop(lengths)

    def reset(self, b: int) -> None:
        self.runner.reset(b)

    def _note_seconds(self, num_guesses: int, seconds: float) -> None:
        self.stats.seconds += seconds
        self._tuner.note_round(self.stats.name, num_guesses, seconds)

    def _record_draft(self, num_before: int, active: list[bool], started: Any) -> None:
        """Notes a pass that guessed one token of each active row, behind so many in the block."""
        self._clock.since(started, partial(self._note_seconds, num_before))
        for _ in range(sum(active)):
            self.stats.record(0, 0)

    def _record(
        self, proposal: Proposal, emitted: list[Emitted], started: Any, guessing: list[bool]
    ) -> None:
        proposer = self.below.stats.name if self.below is not None else None
        self._clock.since(started, partial(self._note_seconds, max(proposal.counts)))
        rows = zip(emitted, proposal.counts, guessing, strict=True)
        for row, num_draft, is_guessing in rows:
            if row.tokens:
                num_accepted = len(row.tokens) - 1
                num_tested = self.stats.record(num_draft, num_accepted)
                if proposer is not None and is_guessing:
                    # No guess at all counts as one that was rejected: nothing was gained.
                    self._tuner.note_acceptance(proposer, max(num_tested, 1), num_accepted)


def _emitted(proposal: Proposal, verdict: Verdict, b: int) -> Emitted:
    n = verdict.num_accepted[b]
    own = "bonus" if n == proposal.counts[b] else "recovered"
    tokens = [*verdict.guesses[b][:n], verdict.next_tokens[b]]
    return Emitted(tokens, [*proposal.origins[b][:n], own])
