"""A level of the cascade (`cascade.py`): what verifies the stage below it and proposes to the one
above; and the protocols of stages and of runners, models with a cache.

Legend: B rows, N proposed tokens, V vocab.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from minitri.decoding.meter import Meter
from minitri.decoding.random_source import RandomSource
from minitri.decoding.verification import Proposal, Verdict
from minitri.stats import LevelStats


@dataclass(frozen=True)
class Output:
    """What a pass of a model gives: distributions, and the logits they were made of."""

    probs_BNV: Tensor
    logits_BNV: Tensor | None = None
    """None where the pass was captured, and they were not asked for."""


@dataclass(frozen=True)
class Emitted:
    """The tokens that a round added to a row, and where each of them came from."""

    tokens: list[int]
    origins: list[str]
    """The stage that guessed the token (`draft`, `retrieval`), or `recovered` or `bonus`."""
    logits_NV: Tensor | None = field(default=None, compare=False, repr=False)
    """The verifier's logits at the place of each token, if its pass kept them."""


class Follower(Protocol):
    """Something that follows the texts as they grow: a stage of the cascade, or a runner."""

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """Called before a step that uses it, when all `sequences` are certain."""

    def crop(self, lengths: list[int]) -> None:
        """Drops what it knows of row b after the first `lengths[b]` tokens: it was rejected."""

    def reset(self, b: int) -> None:
        """Drops all that it knows of row b."""


class Stage(Follower, Protocol):
    """Something that proposes tokens: a `Level`, or a drafter without a model."""

    stats: LevelStats
    gamma: int
    """Tokens to collect for a proposal; the last round may overshoot it."""

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Guesses the next tokens of the active rows; leaves `sequences` as they were."""


class Runner(Follower, Protocol):
    """A model with a cache, as a level sees it; see `runner.py`."""

    def next_probs(
        self,
        sequences: list[list[int]],
        active: list[bool],
        guesses: Proposal | None = None,
        *,
        wants_logits: bool = False,
    ) -> Output:
        """Distributions after each row's last token and after each of its guesses, in order.

        Shape (B, N + 1, V). Reads what the cache has not seen of the active rows; rows that are not
        active get numbers that mean nothing. The output has logits if they are asked for.
        """

    def next_probs_after(self, tokens_B: Tensor, active: list[bool]) -> Tensor:
        """Reads one more token of each active row, which the host need not know: (B, V)."""

    def commit(self, emitted: list[Emitted], active: list[bool]) -> None:
        """Called after every step with what became certain."""


class Level:
    """One level of the cascade: verifies the stage below it, proposes to the level above."""

    def __init__(
        self, runner: Runner, source: RandomSource, stats: LevelStats, meter: Meter
    ) -> None:
        self.runner = runner
        self.stats = stats
        self.below: Stage | None = None  # like gamma, set before every step: see `Cascade`
        self.gamma = 1
        self._source = source
        self._meter = meter

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
        """Guesses `gamma` tokens of every active row, one after the other, on the device."""
        tokens, probs = list[Tensor](), list[Tensor]()
        for i in range(self.gamma):
            with self._meter.drafting(self.stats, sum(active)):
                if i == 0:
                    probs.append(self.runner.next_probs(sequences, active).probs_BNV.squeeze(1))
                else:
                    probs.append(self.runner.next_probs_after(tokens[-1], active))
                positions = [len(sequence) + i for sequence in sequences]
                tokens.append(self._source.sample(probs[-1], positions, active))
        counts = [self.gamma if on else 0 for on in active]
        origins = [[self.stats.name] * count for count in counts]
        return Proposal(counts, torch.stack(tokens, 1), torch.stack(probs, 1), origins)

    def round(
        self,
        sequences: list[list[int]],
        active: list[bool],
        guessing: list[bool] | None = None,
        *,
        wants_logits: bool = False,
    ) -> tuple[list[Emitted], Tensor]:
        """Lets the stage below guess, for the rows that are `guessing` (None: for all active ones),
        and verifies its guesses; returns what `verify` does."""
        guessing = active if guessing is None else guessing
        if self.below is None or not any(guessing):
            proposal = Proposal.nothing(len(sequences))
        else:
            proposal = self.below.propose(sequences, guessing)
        with self._meter.round(self.stats, max(proposal.counts)):
            emitted, probs_BNV = self.verify(sequences, active, proposal, wants_logits=wants_logits)
        proposer = self.below.stats.name if self.below is not None else None
        for b, row in enumerate(emitted):
            if row.tokens:
                self._note_verdict(proposal, b, row, proposer if guessing[b] else None)
        return emitted, probs_BNV

    def verify(
        self,
        sequences: list[list[int]],
        active: list[bool],
        proposal: Proposal,
        *,
        wants_logits: bool = False,
    ) -> tuple[list[Emitted], Tensor]:
        """Verifies a proposal in one forward pass and appends the outcome to the active rows.

        Returns what was appended, and the distributions (B, N + 1, V) of this level, of which the
        tokens appended to row b follow the first ones.
        """
        starts = [len(sequence) for sequence in sequences]
        output = self.runner.next_probs(sequences, active, proposal, wants_logits=wants_logits)
        verdict = self._source.verify(proposal, output.probs_BNV, starts, active)
        rows = enumerate(active)
        emitted = [
            _emitted(proposal, verdict, output, b) if on else Emitted([], []) for b, on in rows
        ]
        for sequence, new in zip(sequences, emitted, strict=True):
            sequence += new.tokens
        self.crop([start + n for start, n in zip(starts, verdict.num_accepted, strict=True)])
        return emitted, output.probs_BNV

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        with self._meter.catching_up(self.stats):
            self.runner.prepare(sequences, active)

    def crop(self, lengths: list[int]) -> None:
        """Drops what was rejected, here and in the stages below."""
        self.runner.crop(lengths)
        if self.below is not None:
            self.below.crop(lengths)

    def reset(self, b: int) -> None:
        self.runner.reset(b)

    def _note_verdict(
        self, proposal: Proposal, b: int, emitted: Emitted, proposer: str | None
    ) -> None:
        self._meter.note_verdict(self.stats, proposer, proposal.counts[b], len(emitted.tokens) - 1)


def _emitted(proposal: Proposal, verdict: Verdict, output: Output, b: int) -> Emitted:
    n = verdict.num_accepted[b]
    own = "bonus" if n == proposal.counts[b] else "recovered"
    tokens = [*verdict.guesses[b][:n], verdict.next_tokens[b]]
    logits_NV = None if output.logits_BNV is None else output.logits_BNV[b, : len(tokens)]
    return Emitted(tokens, [*proposal.origins[b][:n], own], logits_NV)
