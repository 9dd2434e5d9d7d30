"""The cascade: stages that propose tokens to one another (TriForce, Algorithm 1).

A `Level` is a model with a cache. It verifies the proposals of the stage below it and, by doing so, makes blocks that
it proposes to the level above. Stacked, they are every method there is:

    autoregressive   Level(target, full)
    naive            Level(draft, streaming)  ->  Level(target, full)
    retrieval        Level(target, retrieval) ->  Level(target, full)
    triforce         Level(draft, streaming)  ->  Level(target, retrieval)  ->  Level(target, full)

A level without a stage below it verifies the empty proposal: one new token, drawn from its own law. So a drafter is
nothing special, and n-gram lookup (`drafters/ngram.py`) is the only other kind of stage.

All stages share one list of tokens per row. Its committed beginning is the text; behind it stand the guesses of the
stages at work. The invariant: a level has read a beginning of each list, never the last token, and reads what it has
not read yet when it is asked for laws. Whoever takes guesses back off a list tells the stages below it to forget them.

Whether another round is run depends on counts alone, never on a token drawn in it, so that a block's tokens follow
their laws. This file knows no tensors but laws, no model, no files and no devices.

Legend: B rows, N proposed tokens, V vocab.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minitri.decoding.random_source import Coins
from minitri.decoding.stats import LevelStats
from minitri.decoding.verification import Proposal, Verdict


class Stage(Protocol):
    """What a level sees of the stage below it."""

    stats: LevelStats
    block: int
    """Tokens to collect before the level above verifies them; a last round may overshoot it."""

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Guesses the next tokens of the active rows, and leaves `sequences` as they were."""
        ...

    def forget(self, lengths: list[int]) -> None:
        """Keeps at most the first `lengths[b]` tokens of row b in mind: what followed was rejected."""
        ...


class Reader(Protocol):
    """A model with a cache and a law; see `reader.py`."""

    def read(self, sequences: list[list[int]], counts: list[int], active: list[bool]) -> Tensor:
        """Laws (B, max(counts) + 1, V) behind each of row b's last `counts[b] + 1` tokens, in order.

        Reads what the cache has not seen of the active rows. Rows that are not active get laws that mean nothing.
        """
        ...

    def forget(self, lengths: list[int]) -> None:
        """Keeps at most the first `lengths[b]` tokens of row b."""
        ...


@dataclass(frozen=True)
class Emitted:
    """What one step added to a row: tokens, and where each of them came from."""

    tokens: list[int]
    origins: list[str]
    """The name of the stage that guessed the token, or `recovered` or `bonus` for the last level's own."""


class Level:
    """One level of the cascade: a reader, the stage below it (or None), and how long its own blocks are."""

    def __init__(
        self, reader: Reader, below: Stage | None, coins: Coins, stats: LevelStats, *, block: int
    ) -> None:
        """`below` and `block` may be changed between steps: see `Cascade`."""
        self.reader = reader
        self.below = below
        self.stats = stats
        self._coins = coins
        self.block = block

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Runs rounds until every active row has a block of guesses."""
        starts = [len(sequence) for sequence in sequences]
        laws: list[list[Tensor]] = [[] for _ in sequences]
        origins: list[list[str]] = [[] for _ in sequences]
        busy = active
        while any(busy):
            emitted, laws_BNV = self.round(sequences, busy)
            for b, row in enumerate(emitted):
                laws[b].append(laws_BNV[b, : len(row.tokens)])
                origins[b] += [*row.origins[:-1], self.stats.name] if row.tokens else []
            busy = [on and len(row) < self.block for on, row in zip(active, origins, strict=True)]
        tokens = [sequence[start:] for sequence, start in zip(sequences, starts, strict=True)]
        for sequence, start in zip(sequences, starts, strict=True):
            del sequence[start:]
        padded_BNV = torch.nn.utils.rnn.pad_sequence(
            [torch.cat(row) for row in laws], batch_first=True
        )
        return Proposal(tokens, padded_BNV, origins)

    def round(self, sequences: list[list[int]], active: list[bool]) -> tuple[list[Emitted], Tensor]:
        """Has the stage below guess and decides; returns what `decide` does."""
        proposal = (
            self.below.propose(sequences, active)
            if self.below is not None
            else Proposal.nothing(len(sequences))
        )
        started = time.perf_counter()
        emitted, laws_BNV = self.decide(sequences, active, proposal)
        seconds = time.perf_counter() - started
        self.stats.seconds += seconds
        self.stats.recent.note_time(max(proposal.counts), seconds)
        proposer = self.below.stats.name if self.below is not None else None
        for row, count in zip(emitted, proposal.counts, strict=True):
            if row.tokens:
                self.stats.record(
                    num_draft=count, num_accepted=len(row.tokens) - 1, proposer=proposer
                )
        return emitted, laws_BNV

    def decide(
        self, sequences: list[list[int]], active: list[bool], proposal: Proposal
    ) -> tuple[list[Emitted], Tensor]:
        """Verifies a proposal and appends what follows from it to the active rows.

        Returns what was appended, and the laws (B, N + 1, V) that these tokens follow, row by row from the first.
        """
        starts = [len(sequence) for sequence in sequences]
        for sequence, guesses in zip(sequences, proposal.tokens, strict=True):
            sequence += guesses
        laws_BNV = self.reader.read(sequences, proposal.counts, active)
        verdict = self._coins.judge(proposal, laws_BNV, starts, active)
        kept = [start + n for start, n in zip(starts, verdict.num_accepted, strict=True)]
        emitted = []
        for b, sequence in enumerate(sequences):
            if active[b]:
                sequence[kept[b] :] = [verdict.next_tokens[b]]
            emitted.append(self._emitted(proposal, verdict, b) if active[b] else Emitted([], []))
        self.forget(kept)
        return emitted, laws_BNV

    def forget(self, lengths: list[int]) -> None:
        """Keeps at most the first `lengths[b]` tokens of row b, here and below."""
        self.reader.forget(lengths)
        if self.below is not None:
            self.below.forget(lengths)

    @staticmethod
    def _emitted(proposal: Proposal, verdict: Verdict, b: int) -> Emitted:
        n = verdict.num_accepted[b]
        own = "bonus" if n == proposal.counts[b] else "recovered"
        return Emitted(
            [*proposal.tokens[b][:n], verdict.next_tokens[b]], [*proposal.origins[b][:n], own]
        )


class Cascade:
    """The last level together with the texts it extends: every `step` commits tokens that follow the target's law."""

    def __init__(
        self,
        top: Level,
        sequences: list[list[int]],
        commit: Callable[[list[Emitted], list[bool]], None],
        steer: Callable[[list[bool]], None] | None = None,
    ) -> None:
        """`sequences` are the prompts, one list per row, which the cascade extends in place. `commit` is called after
        every step with what it added and the active rows: the small caches take over what is now certain. `steer` is
        called before every step and may stack the stages anew and change their blocks; what it does may depend on how
        many tokens were accepted and how long that took, never on which tokens they were."""
        self.sequences = sequences
        self.active = [True] * len(sequences)
        self._top = top
        self._commit = commit
        self._steer = steer

    def start(self) -> list[Emitted]:
        """The first token of every row, from the target alone; its cache has read the prompts but for one token."""
        emitted, _ = self._top.decide(
            self.sequences, self.active, Proposal.nothing(len(self.sequences))
        )
        self._commit(emitted, self.active)
        return emitted

    def step(self) -> list[Emitted]:
        """Adds at least one token to every active row."""
        if self._steer is not None:
            self._steer(self.active)
        emitted, _ = self._top.round(self.sequences, self.active)
        self._commit(emitted, self.active)
        return emitted

    def retire(self, b: int) -> None:
        """Takes row b out: it has ended. Its caches are emptied, so that it costs no attention any more."""
        self.active[b] = False
        self._top.forget(
            [0 if b == other else len(sequence) for other, sequence in enumerate(self.sequences)]
        )
