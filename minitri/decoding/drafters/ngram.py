"""The drafter that needs no model: what followed the last words when they stood in the text before?

It looks for the latest earlier occurrence of the last few tokens, in prompt and output, that has enough tokens behind
it, and proposes those. Its law is one-hot, hence exact: q(x) = 1 for the token it says. Where nothing matches it
proposes nothing.
"""

from __future__ import annotations

import time

import torch

from minitri.decoding.stats import LevelStats
from minitri.decoding.verification import Proposal

LONGEST, SHORTEST = 4, 2
"""Tokens that must match: the longest match wins, and one shorter than this says too little."""


class NgramDrafter:
    """Prompt lookup for B rows."""

    def __init__(
        self,
        batch_size: int,
        num_guesses: int,
        stats: LevelStats,
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.stats = stats
        self.block = num_guesses
        self._vocab_size = vocab_size
        self._device = device
        self._history = [
            torch.empty(0, dtype=torch.int64) for _ in range(batch_size)
        ]  # the tokens that are certain

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Up to `num_guesses` tokens for each active row, none where nothing matches."""
        started = time.perf_counter()
        tokens = [
            self._lookup(b, row) if on else []
            for b, (row, on) in enumerate(zip(sequences, active, strict=True))
        ]
        laws_BNV = torch.zeros(
            len(tokens), max(map(len, tokens)), self._vocab_size, device=self._device
        )
        proposal = Proposal(tokens, laws_BNV, [[self.stats.name] * len(row) for row in tokens])
        laws_BNV.scatter_(2, proposal.tokens_BN(self._device).unsqueeze(2), 1.0)
        seconds = time.perf_counter() - started
        self.stats.seconds += seconds
        self.stats.recent.note_time(0, seconds / self.block)
        return proposal

    def forget(self, lengths: list[int]) -> None:
        """Nothing to do: only tokens that are certain are remembered."""

    def commit(self, sequences: list[list[int]], active: list[bool]) -> None:  # noqa: ARG002 (costs nothing)
        """Remembers the sequences, which are all certain now."""
        for b, sequence in enumerate(sequences):
            fresh = sequence[len(self._history[b]) :]
            self._history[b] = torch.cat((self._history[b], torch.tensor(fresh, dtype=torch.int64)))

    def _lookup(self, b: int, sequence: list[int]) -> list[int]:
        history = self._history[b]
        for n in range(min(LONGEST, len(sequence)), SHORTEST - 1, -1):
            num_starts = len(history) - n  # a match must be followed by something
            if num_starts < 1:
                continue
            matches = torch.ones(num_starts, dtype=torch.bool)
            for offset, token in enumerate(sequence[-n:]):
                matches &= history[offset : offset + num_starts] == token
            follows = matches.nonzero().flatten() + n
            if len(follows):
                complete = follows[follows + self.block <= len(history)]
                best = int(complete[-1] if len(complete) else follows[-1])
                return history[best : best + self.block].tolist()
        return []
