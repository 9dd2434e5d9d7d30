"""Texts that are looked up: where did the last words of a text stand before, in it or in others?

The index is that of LZ77 compressors. It knows the latest place of every pair of tokens, and from
every place the one before it with the same pair. A lookup walks these places and compares backwards
from each; the longest match wins, among equals the latest. Tokens are added in constant time.

Only tokens that are certain are ever added: a guess is something to look up, nothing to learn.
"""

from collections.abc import Sequence
from itertools import cycle, islice

from minitri.decoding.noise import noise_key

LONGEST = 64
"""Tokens of a match that are compared; so a text that is one long loop costs little."""
MOST_PLACES = 1000
"""Places that a lookup compares, the latest ones; so a frequent pair costs at most 0.1 ms."""
MAX_HISTORY = 1 << 18
"""Tokens of earlier runs that are remembered, at about 200 bytes each."""
END = -1
"""Stands behind every text of a history; no token equals it."""


class GrowingText:
    """The certain tokens of one row, and their index."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._latest: dict[int, int] = {}  # of the second token of every pair
        self._earlier: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens that are certain."""
        before = self.tokens[-1] if self.tokens else END
        latest, earlier = self._latest, self._earlier
        for place, token in enumerate(tokens, len(self.tokens)):
            pair = before << 32 | token
            earlier.append(latest.get(pair, -1))
            latest[pair] = place
            before = token
        self.tokens += tokens

    def lookup(self, sequence: list[int], limit: int) -> tuple[int, list[int]]:
        """How many of the last tokens of `sequence` stood here before, and what followed them.

        `sequence` is this text and what may come behind it. Nothing is found if fewer than two
        tokens agree. What followed is `limit` tokens: a text that repeats itself goes on doing so.
        """
        length, end = self._longest_match(sequence)
        return length, list(islice(cycle(sequence[end : end + limit]), limit)) if length else []

    def _longest_match(self, sequence: list[int]) -> tuple[int, int]:
        """The length of the longest match, and the place behind it."""
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
        return (best, end) if end else (0, 0)


class History(GrowingText):
    """The texts of earlier runs, one behind the other; the oldest are forgotten in time."""

    def __init__(self) -> None:
        super().__init__()
        self._num_seeds = 0

    def fresh_seed(self, seed: int) -> int:
        """A seed that no other text of the history was sampled with.

        Guesses come from texts that may have had the same `seed`. If they were tested with the
        numbers that they were drawn with, what is accepted would not follow the distribution.
        """
        self._num_seeds += 1
        return noise_key(seed, self._num_seeds)

    def learn(self, tokens: list[int]) -> None:
        """Adds a text that is over."""
        self.extend([*tokens, END])
        if len(self.tokens) > MAX_HISTORY:
            kept = self.tokens[-MAX_HISTORY // 2 :]
            self.tokens, self._latest, self._earlier = [], {}, []
            self.extend(kept)

    def lookup(self, sequence: list[int], limit: int) -> tuple[int, list[int]]:
        """How many of the last tokens of any `sequence` stood here, and what followed them, up to
        `limit` tokens and the end of that text."""
        length, end = self._longest_match(sequence)
        followed = self.tokens[end : end + limit] if length else []
        return length, followed[: followed.index(END)] if END in followed else followed
