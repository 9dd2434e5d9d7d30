"""The drafter without a model: guesses what followed the last words where they stood before.

The longest match in the row's own text wins. How much is guessed depends on its length and on what
became of the row's earlier guesses. A guess is certain, so its distribution is one-hot.
"""

import copy
import math
from collections import Counter, defaultdict
from itertools import cycle, islice
from typing import Self

import torch

from minitri.core.decoding.level import Stage
from minitri.core.decoding.meter import Meter
from minitri.core.decoding.verification import Active, Proposal, Rows
from minitri.core.stats import LevelStats, num_common

LEAST_CHANCE = 0.05
"""A token is guessed only if its chance to be accepted is larger: about the cost of one more row in
a pass of the target, as a share of it. 0.03 and 0.1 do as well, see tools/RESULTS.md."""
LONGEST = 64
"""Tokens of a match that are compared; so a text that is one long loop costs little."""
MOST_PLACES = 1000
"""Places that a lookup compares, the latest ones; so a frequent pair costs at most 0.1 ms."""


class GrowingText:
    """The certain tokens of one row, their index, and what became of the guesses."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places = defaultdict[tuple[int, ...], list[int]](list)  # where each pair ends
        # Guesses by the size of the match that they came from, its power of 2.
        self._tested = Counter[int]()
        self._accepted = Counter[int]()
        self._guess: list[int] = []  # after the last certain token
        self._size = 0

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens that are certain; learns from them whether the last guess was right."""
        num_accepted = num_common(tokens, self._guess)
        self._tested[self._size] += min(num_accepted + 1, len(tokens), len(self._guess))
        self._accepted[self._size] += num_accepted
        self._guess = []
        first = max(len(self.tokens), 1)
        self.tokens += tokens
        for place in range(first, len(self.tokens)):
            self._places[tuple(self.tokens[place - 1 : place + 1])].append(place)

    def propose(self, sequence: list[int], gamma: int) -> list[int]:
        """Up to `gamma` guesses after the certain tokens and the guesses in flight."""
        length, guess = self.lookup(sequence, gamma)
        size = length.bit_length()
        if guess:
            # By the rule of succession; that `length` tokens agree is evidence of its own.
            rate = (length + self._accepted[size]) / (length + 2 + self._tested[size])
            guess = guess[: max(1, int(math.log(LEAST_CHANCE) / math.log(rate)))]
        if len(sequence) == len(self.tokens):
            self._guess = guess
            self._size = size
        return guess

    def lookup(self, sequence: list[int], limit: int) -> tuple[int, list[int]]:
        """How many of the last tokens of `sequence`, this text and guesses after it, stood here
        before, 2 at least, and the `limit` tokens that followed: what repeats itself goes on."""
        tokens = self.tokens
        best, end = 1, 0
        latest = sequence[: -LONGEST - 1 : -1]
        reach = len(latest)
        places = self._places.get(tuple(sequence[-2:]), [])
        skipped = places[-1:] == [len(tokens) - 1]  # nothing follows
        for place in islice(reversed(places), skipped, skipped + MOST_PLACES):
            if best == reach or best > place:  # a match at a place has at most place + 1 tokens
                break
            if tokens[place - best] == latest[best]:  # else it is not longer
                length = num_common(latest, tokens[max(place + 1 - reach, 0) : place + 1][::-1])
                if length > best:
                    best, end = length, place + 1
        if not end:
            return 0, []
        return best, list(islice(cycle(sequence[end : end + limit]), limit))


class LookupDrafter(Stage):
    """Lookup for B rows."""

    def __init__(
        self,
        batch_size: int,
        stats: LevelStats,
        meter: Meter,
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        super().__init__(stats, meter)
        self._vocab_size = vocab_size
        self._device = device
        self._rows = [GrowingText() for _ in range(batch_size)]

    def prepare(self, sequences: Rows, active: Active) -> None:
        """Learns the tokens that became certain since it was last used."""
        for row, sequence, on in zip(self._rows, sequences, active, strict=True):
            if on:
                row.extend(sequence[len(row.tokens) :])

    def propose(self, sequences: Rows, active: Active) -> Proposal:
        with self._meter.round(self.stats, num_tokens=self.gamma):
            rows = zip(self._rows, sequences, active, strict=True)
            tokens = [row.propose(sequence, self.gamma) if on else [] for row, sequence, on in rows]
            shape = (len(tokens), max(map(len, tokens)), self._vocab_size)
            probs_BNV = torch.zeros(shape, device=self._device)
            origins = [[self.stats.name] * len(row) for row in tokens]
            proposal = Proposal.of(tokens, probs_BNV, origins)
            probs_BNV.scatter_(2, proposal.tokens_BN.unsqueeze(2), 1.0)
        return proposal

    def reset(self, b: int) -> None:
        self._rows[b] = GrowingText()

    def of_rows(self, rows: slice) -> Self:
        part = copy.copy(self)
        part._rows = self._rows[rows]
        return part
