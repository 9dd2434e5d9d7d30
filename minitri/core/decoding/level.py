"""Stages of the cascade: a level verifies the stage below it, and proposes to the level above.
Legend: B rows, N tokens or places of a block, V vocab; p verifier's, q proposer's distribution.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minitri.core.decoding.random_source import RandomSource
from minitri.core.decoding.verification import Active, Emitted, Proposal, Rows
from minitri.core.runner import ModelRunner
from minitri.core.settings import StepPlan
from minitri.core.stats import LevelStats, Meter


class Stage:
    """Base class of stages, which propose tokens: a `Level`, or a drafter without a model."""

    def __init__(self, name: str, meter: Meter) -> None:
        """`name`: draft, retrieval or target. Adds its counts to the list `meter.stats.stages`."""
        self.name = name  # draft, retrieval or target
        self.stats = LevelStats(name)
        meter.stats.stages.append(self.stats)  # so the lowest stage is made first
        self.gamma = 1  # tokens to propose, which a last round may exceed; the target proposes none
        self.below: Stage | None = None  # stage that guesses; `Cascade` sets this and `gamma`
        self._meter = meter

    def propose(self, sequences: Rows, active: Active) -> Proposal:
        """Guesses tokens after active rows' sequences, which are unchanged afterwards."""
        raise NotImplementedError

    @contextmanager
    def timed_round(self, num_guesses: int = 0, num_tokens: int = 1) -> Iterator[None]:
        """Context to time a round, which verifies `num_guesses` per row or samples `num_tokens`."""

        def take(seconds: float) -> None:
            self.stats.seconds += seconds
            self._meter.tuner.note_round(self.name, num_guesses, seconds / num_tokens)

        with self._meter.clock.timed(take):
            yield

    def capture(self, plans: Iterable[StepPlan]) -> None:
        """Captures, before the first step, the CUDA graphs that this stage needs in these plans."""

    def prepare(self, sequences: Rows, active: Active) -> None:
        """Before a step: updates the stage's state, such as a cache, by active rows' new tokens."""

    def crop(self, lengths: list[int]) -> None:
        """Drops state after the first `lengths[b]` tokens of each row b: the rest was rejected."""

    def reset(self, b: int) -> None:
        """Drops all state of row b, whose text has ended."""

    def of_rows(self, rows: slice) -> Self:
        """A view of this stage on a slice of the rows, which shares their state."""
        raise NotImplementedError


class Level(Stage):
    """One level of the cascade: verifies the stage below, and proposes to the level above."""

    def __init__(self, name: str, meter: Meter, runner: ModelRunner, source: RandomSource) -> None:
        super().__init__(name, meter)
        self.runner = runner  # the draft model's is a `DraftRunner`
        self.source = source  # random numbers, and the rule of verification

    def propose(self, sequences: Rows, active: Active) -> Proposal:
        """Proposes `gamma` tokens or more per active row: own, or verified if a stage is below."""
        if not self.below:
            return self._draft(sequences, active)
        probs: list[list[Tensor]] = [[] for _ in sequences]
        origins: list[list[str]] = [[] for _ in sequences]
        failed = set[int]()
        unfinished = active
        starts = [len(sequence) for sequence in sequences]
        blocks: Rows = []  # the level above takes all of these tokens as guesses
        try:  # rounds append to the texts themselves: to copy a long one takes 0.1 ms and more
            while any(unfinished):
                for b, new in enumerate(self.round(sequences, unfinished, unfinished)):
                    probs[b].append(new.probs_NV)
                    if new.tokens:  # this level sampled the last one, recovered or bonus, itself
                        origins[b] += [*new.origins[:-1], self.name]
                    elif unfinished[b]:
                        failed.add(b)
                unfinished = [
                    on and len(origins[b]) < self.gamma and b not in failed
                    for b, on in enumerate(active)
                ]
        finally:
            for sequence, start in zip(sequences, starts, strict=True):
                blocks.append(sequence[start:])
                del sequence[start:]
        probs_BNV = pad_sequence([torch.cat(row) for row in probs], batch_first=True)
        return Proposal.of(blocks, probs_BNV, origins, failed=failed)

    def _draft(self, sequences: Rows, active: Active) -> Proposal:
        """Guesses `gamma` tokens after each active row's sequence by this level's own model."""
        self.stats.num_rounds += self.gamma * sum(active)
        with self.timed_round(num_tokens=self.gamma):
            guesses = self.runner.draft(sequences, active, self.gamma, self.source)
        counts = [self.gamma if on else 0 for on in active]
        origins = [[self.name] * count for count in counts]
        return Proposal(counts, *guesses, origins)

    def round(self, sequences: Rows, active: Active, guessing: Active) -> list[Emitted]:
        """One round: the stage below guesses if `guessing[b]`, this level verifies if `active[b]`.
        Appends what each row emits to its sequence, and returns it."""
        proposal = Proposal.nothing(len(sequences))
        if self.below and any(guessing):
            proposal = self.below.propose(sequences, guessing)
        with self.timed_round(max(proposal.counts)):
            emitted = self.verify(sequences, active, proposal)
            self._meter.clock.settle()  # waits for the device
        for b, new in enumerate(emitted):
            if new.tokens:
                num_accepted = len(new.tokens) - 1
                num_tested = self.stats.count(proposal.depth(b), num_accepted)
                if self.below and guessing[b]:
                    # A proposal without guesses counts as one rejected guess: nothing was gained.
                    counts = (max(num_tested, 1), num_accepted)
                    self._meter.tuner.note_acceptance(self.below.name, *counts)
        return emitted

    def verify(self, sequences: Rows, active: Active, proposal: Proposal) -> list[Emitted]:
        """Verifies a proposal in one pass of the model; appends what active rows emit to their
        sequences, and returns it: at least one token, or none if p or q is not finite."""
        output = self.runner.next_probs(sequences, active, proposal, self.source)
        outcome = output.emitted_rows
        if outcome is None:
            starts = [*map(len, sequences)]
            outcome = self.source.verify(proposal, output.probs_BNV, starts, active)
        emitted = list[Emitted]()
        for b, tokens in enumerate(outcome):
            N = len(tokens) if active[b] else 0
            last = "bonus" if proposal.counts[b] < N else "recovered"
            origins = [*proposal.origins[b][: N - 1], last][:N]
            emitted.append(output.emitted(b, tokens[:N], origins, slice(N)))
        self._append(sequences, emitted)
        return emitted

    def _append(self, sequences: Rows, emitted: list[Emitted]) -> None:
        """Appends emitted tokens to the texts; drops rejected guesses here and in stages below."""
        lengths = list[int]()
        for sequence, new in zip(sequences, emitted, strict=True):
            sequence += new.tokens
            lengths.append(len(sequence) - bool(new.tokens))  # the last token is not read yet
        self.crop(lengths)

    def capture(self, plans: Iterable[StepPlan]) -> None:
        B = len(self.runner.sampling)
        nobody = ([[0]] * B, [False] * B)
        for size in reversed(self.runner.block_sizes):  # writes to slots after the prefixes only
            guesses = Proposal.of([[0] * (size - 1)] * B, torch.zeros(B, size - 1, 0), "")
            self.runner.next_probs(*nobody, guesses, self.source)
            output = self.runner.next_probs(*nobody, guesses)
            self.source.verify(guesses, output.probs_BNV, [0] * B, nobody[1])
        for N in {  # lengths of drafts; the retrieval level makes all tokens after the first alike
            plan.gamma1 or min(plan.gamma2, 2)
            for plan in plans
            if [self.name] == plan.proposers[:1] and not plan.tree
        }:
            self.runner.draft(*nobody, N, self.source)

    def prepare(self, sequences: Rows, active: Active) -> None:
        self.runner.prepare(sequences, active)

    def crop(self, lengths: list[int]) -> None:
        self.runner.cache.crop(lengths)
        if self.below:
            self.below.crop(lengths)

    def reset(self, b: int) -> None:
        self.runner.reset(b)

    def of_rows(self, rows: slice) -> Self:
        part = copy.copy(self)
        part.runner = self.runner.of_rows(rows)
        part.source = self.source.of_rows(rows)
        part.below = None
        return part
