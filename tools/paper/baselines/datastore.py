"""A drafter that looks the last words up in a datastore: the tokens of many texts (REST).

    store = Datastore.of(texts, tokenizer.num_tokens)
    engine = minitri.load("smollm2-135m", drafter=store)

`tokens` are all texts, each with a token at its end that no text has. `order` are the places of
`tokens`, sorted by what stands there and before it, read backwards, up to `LONGEST` tokens. So all
places whose last words agree with those of a text stand together, and bisection finds them. REST:
He et al. 2023, arXiv 2311.08252; a suffix array of the reversed text.
"""

from bisect import bisect_left, bisect_right
from functools import partial
from typing import Any, Self

import numpy as np

from minitri.stats import num_common

LONGEST = 32
"""Tokens of a match that are compared, a power of 2."""
SHORTEST = 2
"""Tokens that must agree: a single one says too little."""
MOST_PLACES = 64
"""Places that vote on what follows."""
Array = np.ndarray[Any, np.dtype[Any]]


class Datastore:
    """Texts to be looked up: a `minitri.Drafter`."""

    def __init__(self, tokens: Array, order: Array) -> None:
        self._tokens = tokens
        self._order = order
        self._end = int(tokens[-1])  # stands after every text

    @classmethod
    def of(cls, texts: list[list[int]], end: int) -> Self:
        """Of texts in tokens below `end`, 60 bytes of memory for each while it is made."""
        tokens = np.concatenate([np.array([*text, end], np.uint32) for text in texts])
        return cls(tokens, sorted_places(tokens).astype(np.uint32))

    def guess(self, tokens: list[int], row: int) -> int | None:  # noqa: ARG002
        """The token that follows the last words of a text most often here, if they stand here."""
        words = tokens[: -1 - LONGEST : -1]
        place = bisect_left(self._order, words, key=self._before)
        near = self._order[max(place - 1, 0) : place + 1]
        length = max(num_common(self._before(other), words) for other in near)
        if length < SHORTEST:
            return None
        words = words[:length]
        beginning = partial(self._before, num_tokens=length)
        first = bisect_left(self._order, words, hi=place, key=beginning)
        last = bisect_right(self._order, words, lo=place, key=beginning)
        chosen = np.linspace(first, last - 1, min(last - first, MOST_PLACES)).astype(np.int64)
        following = np.minimum(self._order[chosen].astype(np.int64) + 1, len(self._tokens) - 1)
        candidates, counts = np.unique(self._tokens[following], return_counts=True)
        winner = int(candidates[counts.argmax()])
        return winner if winner != self._end else None

    def _before(self, place: int, num_tokens: int = LONGEST) -> list[int]:
        """The token of a place and those before it, backwards."""
        start = max(int(place) + 1 - num_tokens, 0)
        words: list[int] = self._tokens[start : int(place) + 1].tolist()
        return words[::-1]


def sorted_places(tokens: Array) -> Array:
    """All places, sorted by their tokens and those before, backwards; equal ones as in the text.

    By doubling: ranks of k tokens, in pairs, are keys of 2k tokens.
    """
    rank, length = tokens.astype(np.int64), 1
    while True:
        order = np.argsort(rank, kind="stable")
        if length > LONGEST // 2:
            return order
        is_new = np.diff(rank[order], prepend=-1) > 0
        rank[order] = np.cumsum(is_new)  # from 1 on; 0 is the text's beginning
        shifted = np.concatenate((np.zeros(length, np.int64), rank))[: len(rank)]
        rank, length = rank * (len(rank) + 1) + shifted, 2 * length
