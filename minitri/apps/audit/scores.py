"""Scores of how far texts depart from the log-probabilities that a server reports for them.

Only the likeliest tokens of a place are reported, so scores are of the token *given that it is one
of those*, whose distribution is known at every temperature. `likelihood` is its probability over
the largest one; it detects distributions that are too sharp or too flat. `learned` is how much too
often the token came so far after the same token; it detects departures that recur, such as traces
of a drafter. `repeated` is 1 for the guess of a lookup, which a recovered token never is. `copied`
is the share of concurrent answers, equal so far, that continued with the token.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from minitri.apps.audit.client import Bursts, Place
from minitri.apps.selftest.martingale import Martingale

IS_ODD = re.compile("<.*>|.*\ufffd.*|", re.DOTALL)
"""Names of special tokens, which texts may not show, and of parts of characters."""
BEYOND = ""
"""Name of all tokens that are not reported, taken together."""
MATCH_SIZES = range(4, 200)  # in characters


class Departures:
    """Scores of texts, against the reported probabilities raised to a power."""

    def __init__(self, bursts: Bursts, power: float, beyond: bool = False) -> None:
        """`beyond`: tokens that are not reported count as one token."""
        self.likelihood = Martingale()
        self.learned = Martingale()
        self.repeated = Martingale()
        self.copied = Martingale()
        # How often a token came after another one, and how often it was expected there.
        self._seen: Counter[tuple[str, str]] = Counter()
        self._expected: defaultdict[tuple[str, str], float] = defaultdict(float)
        for prompt, burst in bursts:
            others: Counter[tuple[str, ...]] = Counter()
            for text in burst:
                names: tuple[str, ...] = ("",)
                said = prompt
                for place in text:
                    probs = known(place, power, beyond)
                    token = place.token if place.token in probs else BEYOND
                    if token in probs:
                        shares = {name: others[(*names, name)] for name in probs}
                        if total := sum(shares.values()):
                            shared = {name: count / total for name, count in shares.items()}
                            self.copied.add(token, probs, shared)
                        self._take(names[-1], token, probs)
                        if guess := looked_up(said, probs):
                            self.repeated.add(token, probs, Counter([guess]))
                    names += (place.token,)
                    said += place.token
                others.update(names[: n + 1] for n in range(1, len(names)))

    def _take(self, before: str, token: str, probs: dict[str, float]) -> None:
        best = max(probs.values())
        self.likelihood.add(token, probs, {name: prob / best for name, prob in probs.items()})
        learned = {name: (1 + math.tanh(self._excess((before, name)))) / 2 for name in probs}
        self.learned.add(token, probs, learned)
        self._seen[before, token] += 1
        for name, prob in probs.items():
            self._expected[before, name] += prob

    def _excess(self, pair: tuple[str, str]) -> float:
        """How much too often a pair came so far, in standard deviations."""
        expected = self._expected[pair]
        return (self._seen[pair] - expected) / math.sqrt(1 + expected)

    @property
    def worst(self) -> Martingale:
        """Test with the smallest p-value, concurrent answers left out."""
        return min(self.likelihood, self.learned, self.repeated, key=lambda test: test.p_value)


def looked_up(said: str, tokens: Iterable[str]) -> str:
    """Token after the latest of the longest earlier matches of a text's end; "" without a match."""
    follows = ""
    for size in MATCH_SIZES:
        if (place := said.rfind(said[-size:], 0, -1)) < 0:
            break
        follows = said[place + size :]
    return max((token for token in tokens if follows.startswith(token)), key=len, default="")


def known(place: Place, power: float, beyond: bool) -> dict[str, float]:
    """Distribution of the token at a place, given that it is one of those reported."""
    weights = {
        name: math.exp(power * log) for name, log in place.top.items() if not IS_ODD.fullmatch(name)
    }
    if beyond:
        weights[BEYOND] = max(0.0, 1 - sum(weights.values()))
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items() if total}
