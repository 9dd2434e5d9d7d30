"""The drafter that needs no model: prompt lookup by n-grams.

It finds the latest earlier occurrence of the last few tokens, in prompt and output, that has enough
tokens behind it, and guesses those. The guess is certain, so its distribution is one-hot: q(x) = 1.
Where nothing matches it guesses nothing.
"""

import time

import torch

from minitri.decoding.autotuner import Autotuner
from minitri.decoding.stats import LevelStats
from minitri.decoding.verification import Proposal

LONGEST, SHORTEST = 4, 2
"""Tokens that must match: the longest match wins, and a single token says too little."""


class NgramDrafter:
    """Prompt lookup for B rows: a stage of the cascade, see `cascade.Stage`."""

    def __init__(
        self,
        batch_size: int,
        stats: LevelStats,
        tuner: Autotuner,
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.stats = stats
        self.gamma = 1  # set before every step, see `Cascade`
        self._tuner = tuner
        self._vocab_size = vocab_size
        self._device = device
        self._history = [torch.empty(0, dtype=torch.int64) for _ in range(batch_size)]  # certain

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """Learns the tokens that became certain since it was last used."""
        for b, sequence in enumerate(sequences):
            if active[b]:
                fresh = torch.tensor(sequence[len(self._history[b]) :], dtype=torch.int64)
                self._history[b] = torch.cat((self._history[b], fresh))

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Up to `gamma` tokens for each active row, none where nothing matches."""
        started = time.perf_counter()
        tokens = [
            self._lookup(self._history[b], sequence) if active[b] else []
            for b, sequence in enumerate(sequences)
        ]
        shape = (len(tokens), max(map(len, tokens)), self._vocab_size)
        probs_BNV = torch.zeros(shape, device=self._device)
        proposal = Proposal(tokens, probs_BNV, [[self.stats.name] * len(row) for row in tokens])
        probs_BNV.scatter_(2, proposal.tokens_BN(self._device).unsqueeze(2), 1.0)
        seconds = time.perf_counter() - started
        self.stats.seconds += seconds
        self._tuner.note_round(self.stats.name, 0, seconds / self.gamma)
        return proposal

    def crop(self, lengths: list[int]) -> None:
        """Nothing to do: only tokens that are certain are kept."""

    def reset(self, b: int) -> None:
        """Drops row b's tokens."""
        self._history[b] = self._history[b][:0]

    def _lookup(self, history: torch.Tensor, sequence: list[int]) -> list[int]:
        for n in range(min(LONGEST, len(sequence)), SHORTEST - 1, -1):
            num_starts = len(history) - n  # a match must be followed by something
            if num_starts < 1:
                continue
            matches = torch.ones(num_starts, dtype=torch.bool)
            for offset, token in enumerate(sequence[-n:]):
                matches &= history[offset : offset + num_starts] == token
            follows = matches.nonzero().flatten() + n
            if len(follows):
                complete = follows[follows + self.gamma <= len(history)]
                best = int(complete[-1] if len(complete) else follows[-1])
                return history[best : best + self.gamma].tolist()
        return []
