"""A level of the cascade (`cascade.py`): a stage that verifies the one below it and proposes to the
one above; and the protocol of runners, models with a cache.

Legend: B rows, N proposed tokens, V vocab.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minitri.decoding.meter import Meter
from minitri.decoding.random_source import RandomSource
from minitri.decoding.verification import Proposal
from minitri.stats import LevelStats


@dataclass(frozen=True)
class Output:
    """What a pass of a model gives: distributions, and the logits they were made of."""

    probs_BNV: Tensor
    logits_BNV: Tensor | None = None
    """None where the pass was captured, and they were not asked for."""

    def emitted(
        self, b: int, tokens: list[int], origins: list[str], places: slice | list[int]
    ) -> "Emitted":
        """What row b adds to its text, by the distributions at these places of its block."""
        logits_NV = None if self.logits_BNV is None else self.logits_BNV[b, places]
        return Emitted(tokens, origins, self.probs_BNV[b, places], logits_NV)


@dataclass(frozen=True)
class Emitted:
    """The tokens that a round added to a row, and where each of them came from."""

    tokens: list[int]
    origins: list[str]
    """The stage that guessed the token (`draft`, `retrieval`), or `recovered` or `bonus`."""
    probs_NV: Tensor = field(compare=False, repr=False)
    """The verifier's distributions, which the tokens follow."""
    logits_NV: Tensor | None = field(default=None, compare=False, repr=False)
    """The verifier's logits at the place of each token, if its pass kept them."""


class Stage:
    """Something that proposes tokens: a `Level`, or a drafter without a model.

    By default it keeps nothing of the texts, so that it has nothing to drop.
    """

    def __init__(self, stats: LevelStats, meter: Meter) -> None:
        self.stats = stats
        self.gamma = 1
        """Tokens to collect for a proposal, which a last round may overshoot."""
        self.below: Stage | None = None  # set before every step, like gamma: see `Cascade`
        self._meter = meter

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Guesses the next tokens of the active rows; leaves `sequences` as they were."""
        raise NotImplementedError

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """Called before a step that uses it, when all `sequences` are certain."""

    def crop(self, lengths: list[int]) -> None:
        """Drops what it knows of row b after the first `lengths[b]` tokens: it was rejected."""

    def reset(self, b: int) -> None:
        """Drops all that it knows of row b."""


class Runner(Protocol):
    """A model with a cache, as a level sees it; see `runner.py`."""

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """See `Stage`, as for the other two."""

    def crop(self, lengths: list[int]) -> None: ...
    def reset(self, b: int) -> None: ...

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


class Level(Stage):
    """One level of the cascade: verifies the stage below it, proposes to the level above."""

    def __init__(
        self, runner: Runner, source: RandomSource, stats: LevelStats, meter: Meter
    ) -> None:
        super().__init__(stats, meter)
        self.runner = runner
        self._source = source

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Runs rounds until every active row has a block of at least `gamma` tokens."""
        if self.below is None:
            return self._draft(sequences, active)
        starts = [len(sequence) for sequence in sequences]
        probs: list[list[Tensor]] = [[] for _ in sequences]
        origins: list[list[str]] = [[] for _ in sequences]
        unfinished = active
        while any(unfinished):
            for b, row in enumerate(self.round(sequences, unfinished, unfinished)):
                probs[b].append(row.probs_NV)
                origins[b] += [*row.origins[:-1], self.stats.name][: len(row.tokens)]
            unfinished = [
                on and len(row) < self.gamma for on, row in zip(active, origins, strict=True)
            ]
        blocks = list[list[int]]()
        for sequence, start in zip(sequences, starts, strict=True):
            blocks.append(sequence[start:])
            del sequence[start:]
        probs_BNV = pad_sequence([torch.cat(row) for row in probs], batch_first=True)
        return Proposal.of(blocks, probs_BNV, origins)

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
        return self.drafted(torch.stack(tokens, 1), torch.stack(probs, 1), active)

    def drafted(self, tokens_BN: Tensor, probs_BNV: Tensor, active: list[bool]) -> Proposal:
        """The proposal of a stage that guesses `gamma` tokens of every active row."""
        counts = [self.gamma if on else 0 for on in active]
        origins = [[self.stats.name] * count for count in counts]
        return Proposal(counts, tokens_BN, probs_BNV, origins)

    def round(
        self,
        sequences: list[list[int]],
        active: list[bool],
        guessing: list[bool],
        *,
        wants_logits: bool = False,
    ) -> list[Emitted]:
        """Lets the stage below guess for the rows that are `guessing`, and verifies its guesses;
        returns what `verify` does."""
        proposer = None
        proposal = Proposal.nothing(len(sequences))
        if self.below is not None and any(guessing):
            proposer = self.below.stats.name
            proposal = self.below.propose(sequences, guessing)
        with self._meter.round(self.stats, max(proposal.counts)):
            emitted = self.verify(sequences, active, proposal, wants_logits=wants_logits)
        for b, row in enumerate(emitted):
            if row.tokens:
                self._meter.note_acceptance(
                    self.stats,
                    proposer if guessing[b] else None,
                    proposal.depth(b),
                    len(row.tokens) - 1,
                )
        return emitted

    def verify(
        self,
        sequences: list[list[int]],
        active: list[bool],
        proposal: Proposal,
        *,
        wants_logits: bool = False,
    ) -> list[Emitted]:
        """Verifies a proposal in one forward pass and appends the outcome to the active rows."""
        output = self.runner.next_probs(sequences, active, proposal, wants_logits=wants_logits)
        starts = [len(sequence) for sequence in sequences]
        outcome = self._source.verify(proposal, output.probs_BNV, starts, active)
        emitted = list[Emitted]()
        for b, tokens in enumerate(outcome):
            n = len(tokens) - 1
            own = "bonus" if n == proposal.counts[b] else "recovered"
            num_new = n + 1 if active[b] else 0
            origins = [*proposal.origins[b][:n], own][:num_new]
            emitted.append(output.emitted(b, tokens[:num_new], origins, slice(num_new)))
        self._append(sequences, emitted)
        return emitted

    def _append(self, sequences: list[list[int]], emitted: list[Emitted]) -> None:
        """Adds the outcome of a round to the texts; drops what was rejected, and leaves the last
        token to be read."""
        for sequence, new in zip(sequences, emitted, strict=True):
            sequence += new.tokens
        pairs = zip(sequences, emitted, strict=True)
        self.crop([len(sequence) - bool(new.tokens) for sequence, new in pairs])

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
