"""A text that is looked up: where did its last words stand before?

The index is that of LZ77 compressors. It knows the latest place of every pair of tokens, and from
every place the one before it with the same pair. A lookup walks these places and compares backwards
from each; the longest match wins, among equals the latest. Tokens are added in constant time.

Only tokens that are certain are ever added: a guess is something to look up, nothing to learn.
"""

from collections.abc import Sequence
from itertools import cycle, islice

LONGEST = 64
"""Tokens of a match that are compared; so a text that is one long loop costs little."""
MOST_PLACES = 1000
"""Places that a lookup compares, the latest ones; so a frequent pair costs at most 0.1 ms."""


class GrowingText:
    """The certain tokens of one row, and their index."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._latest: dict[int, int] = {}  # of the second token of every pair
        self._earlier: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens that are certain."""
        before = self.tokens[-1] if self.tokens else -1
        for place, token in enumerate(tokens, len(self.tokens)):
            pair = before << 32 | token
            self._earlier.append(self._latest.get(pair, -1))
            self._latest[pair] = place
            before = token
        self.tokens += tokens

    def lookup(self, sequence: list[int], limit: int) -> tuple[int, list[int]]:
        """How many of the last tokens of `sequence` stood here before, and what followed them.

        `sequence` is this text and what may come after it. Nothing is found if fewer than two
        tokens agree. What followed is `limit` tokens: a text that repeats itself goes on doing so.
        """
        tokens, best, end = self.tokens, 1, 0
        reach = min(len(sequence), LONGEST)
        place = self._latest.get(sequence[-2] << 32 | sequence[-1], -1) if reach > 1 else -1
        if place + 1 == len(tokens):  # nothing follows
            place = self._earlier[place] if tokens else -1
        for _ in range(MOST_PLACES):
            if best == reach or best > place:  # a match at a place has at most place + 1 tokens
                break
            if tokens[place - best] == sequence[-1 - best]:  # else it is not longer
                length, most = 2, min(reach, place + 1)
                while length < most and tokens[place - length] == sequence[-1 - length]:
                    length += 1
                if length > best:
                    best, end = length, place + 1
            place = self._earlier[place]
        if not end:
            return 0, []
        return best, list(islice(cycle(sequence[end : end + limit]), limit))
