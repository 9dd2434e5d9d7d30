"""The lookup drafter, without a model: guesses what followed the last tokens earlier in the text.

The longest match wins. Its length, and how many earlier guesses of the row were accepted, decide
the number of guesses. The distribution of a guess is one-hot. Legend: B rows, N guesses, V vocab.
"""

import copy
import math
from collections import Counter, defaultdict
from itertools import cycle, islice
from typing import Self

import torch

from minitri.core.decoding.level import Stage
from minitri.core.decoding.verification import Active, Proposal, Rows
from minitri.core.runner import ModelRunner
from minitri.core.stats import Meter, Tokens, num_common

LEAST_CHANCE = 0.05  # least predicted chance that a guess is accepted, see tools/RESULTS.md
LONGEST = 64  # most tokens of a match; bounds the cost in a text that is one long loop
MOST_PLACES = 1000  # latest places of a pair that a lookup compares, in 0.1 ms at most


class GrowingText:
    """The committed tokens of one row, an index of their pairs, and counts of accepted guesses."""

    def __init__(self) -> None:
        self.tokens: Tokens = []
        self._places = defaultdict[tuple[int, ...], list[int]](list)  # where each pair ends
        self._guess: Tokens = []  # latest guesses right after the committed tokens
        self._size = 0  # bit length of the length of the match that gave these guesses
        self._tested = Counter[int]()  # tested guesses, by `_size`
        self._accepted = Counter[int]()

    def extend(self, tokens: Tokens) -> None:
        """Appends committed tokens, and counts how many of the latest guesses they confirm."""
        num_accepted = num_common(tokens, self._guess)
        self._tested[self._size] += min(num_accepted + 1, len(tokens), len(self._guess))
        self._accepted[self._size] += num_accepted
        self._guess = []
        first = max(len(self.tokens), 1)
        self.tokens += tokens
        for place in range(first, len(self.tokens)):
            self._places[tuple(self.tokens[place - 1 : place + 1])].append(place)

    def propose(self, sequence: Tokens, gamma: int) -> Tokens:
        """Guesses up to `gamma` tokens after `sequence`, the committed text with guesses so far."""
        length, guess = self.lookup(sequence, gamma)
        size = length.bit_length()
        if guess:
            # By the rule of succession; each token of the match counts as an accepted guess.
            rate = (length + self._accepted[size]) / (length + 2 + self._tested[size])
            guess = guess[: max(1, int(math.log(LEAST_CHANCE) / math.log(rate)))]
        if len(sequence) == len(self.tokens):
            self._guess = guess
            self._size = size
        return guess

    def lookup(self, sequence: Tokens, limit: int) -> tuple[int, Tokens]:
        """Finds the longest earlier match, of 2 tokens or more, of the last tokens of `sequence`.
        Returns its length and the `limit` tokens after it, repeated if fewer follow."""
        tokens = self.tokens
        best = 1
        end = 0
        latest = sequence[: -LONGEST - 1 : -1]
        reach = len(latest)
        places = self._places.get(tuple(sequence[-2:]), [])
        skipped = places[-1:] == [len(tokens) - 1]  # no token follows the latest place
        for place in islice(reversed(places), skipped, skipped + MOST_PLACES):
            if best == reach or best > place:  # a match at a place has at most place + 1 tokens
                break
            if tokens[place - best] == latest[best]:  # else the match is not longer
                length = num_common(latest, tokens[max(place + 1 - reach, 0) : place + 1][::-1])
                if length > best:
                    best = length
                    end = place + 1
        if not end:
            return 0, []
        return best, list(islice(cycle(sequence[end : end + limit]), limit))


class LookupDrafter(Stage):
    """Stage that guesses by lookup in each row's text, for the rows and vocabulary of `target`."""

    def __init__(self, meter: Meter, target: ModelRunner) -> None:
        super().__init__("draft", meter)
        self._target = target
        self._rows = [GrowingText() for _ in target.sampling]

    def prepare(self, sequences: Rows, active: Active) -> None:
        for row, sequence, on in zip(self._rows, sequences, active, strict=True):
            if on:
                row.extend(sequence[len(row.tokens) :])

    def propose(self, sequences: Rows, active: Active) -> Proposal:
        with self.timed_round(num_tokens=self.gamma):
            rows = zip(self._rows, sequences, active, strict=True)
            tokens = [row.propose(sequence, self.gamma) if on else [] for row, sequence, on in rows]
            shape = (len(tokens), max(map(len, tokens)), self._target.passes.vocab_size)
            probs_BNV = torch.zeros(shape, device=self._target.model.device)
            proposal = Proposal.of(tokens, probs_BNV, self.name)
            probs_BNV.scatter_(2, proposal.tokens_BN.unsqueeze(2), 1.0)
        return proposal

    def reset(self, b: int) -> None:
        self._rows[b] = GrowingText()

    def of_rows(self, rows: slice) -> Self:
        part = copy.copy(self)
        part._rows = self._rows[rows]
        return part
