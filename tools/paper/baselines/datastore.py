"""A drafter that looks the last words up in a datastore: the tokens of many texts (REST).

    store = Datastore(texts, tokenizer.num_tokens)
    engine = minitri.load("smollm2-135m", drafter=store)

REST: He et al. 2023, arXiv 2311.08252, where a suffix array finds the longest match; here an index
of pairs, of which those that go on to agree are kept, word by word.
"""

from collections import Counter, defaultdict
from itertools import pairwise

LONGEST = 32
"""Tokens of a match that are compared."""


class Datastore:
    """Texts to be looked up: a `minitri.Drafter`."""

    def __init__(self, texts: list[list[int]], end: int) -> None:
        """Texts in tokens below `end`, which stands after each of them."""
        self._end = end
        self._tokens = [token for text in texts for token in (*text, end)]
        self._places = defaultdict[tuple[int, ...], list[int]](list)
        """Token that follows a pair: a single token says too little."""
        for place, pair in enumerate(pairwise(self._tokens), 2):
            self._places[pair].append(place)

    def guess(self, tokens: list[int], row: int) -> int | None:  # noqa: ARG002
        """The token that follows the last words of a text most often here, if they stand here."""
        places = self._places.get(tuple(tokens[-2:]), [])
        for length, word in enumerate(tokens[-3 : -1 - LONGEST : -1], 3):
            longer = [it for it in places if it >= length and self._tokens[it - length] == word]
            if not longer:
                break
            places = longer
        votes = Counter(self._tokens[place] for place in places)
        winner = max(votes, key=lambda token: (votes[token], -token), default=self._end)
        return winner if winner != self._end else None
