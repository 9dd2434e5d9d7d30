"""How far texts depart from the log-probabilities that are told of them: four scores.

Only the likeliest tokens of a place are told, so scores are of the token *given that it is one of
those*: what it must follow is known at every temperature. `likelihood` is its share of the largest
probability, against too sharp or too flat a distribution. `learned` is how much too often it came
so far after the same token, against what departs in the same way again and again, as traces of a
drafter do. `repeated` is whether a lookup guesses it, which a recovered token is not. `copied` is
the share of concurrent answers, the same so far, that went on with it.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable

from minitri.apps.audit.client import Bursts, Place
from minitri.apps.selftest.martingale import Martingale

IS_ODD = re.compile("<.*>|.*\ufffd.*|", re.DOTALL)
"""Names of special tokens, which texts may not show, and of parts of characters."""
BEYOND = ""
"""Stands for all tokens that are not told."""
MATCH_SIZES = range(4, 200)  # in characters


class Departures:
    """The scores of texts against the told probabilities raised to a power."""

    def __init__(self, bursts: Bursts, power: float, beyond: bool = False) -> None:
        """`beyond`: tokens that are not told count."""
        self.likelihood = Martingale()
        self.learned = Martingale()
        self.repeated = Martingale()
        self.copied = Martingale()
        self._seen: Counter[tuple[str, str]] = Counter()  # by the token before and the token itself
        self._expected: dict[tuple[str, str], float] = {}
        for prompt, burst in bursts:
            others: Counter[tuple[str, ...]] = Counter()
            for text in burst:
                names: tuple[str, ...] = ("",)
                said = prompt
                for place in text:
                    probs = known(place, power, beyond)
                    token = place.token if place.token in probs else BEYOND
                    if token in probs:
                        shares = {it: others[(*names, it)] for it in probs}
                        if total := sum(shares.values()):
                            shared = {it: count / total for it, count in shares.items()}
                            self.copied.add(token, probs, shared)
                        self._take(names[-1], token, probs)
                        if guess := looked_up(said, probs):
                            self.repeated.add(token, probs, Counter([guess]))
                    names += (place.token,)
                    said += place.token
                others.update(names[: n + 1] for n in range(1, len(names)))

    def _take(self, before: str, token: str, probs: dict[str, float]) -> None:
        best = max(probs.values())
        self.likelihood.add(token, probs, {it: prob / best for it, prob in probs.items()})
        excess = {it: math.tanh(self._excess((before, it))) for it in probs}
        self.learned.add(token, probs, {it: (1 + one) / 2 for it, one in excess.items()})
        self._seen[before, token] += 1
        for it, prob in probs.items():
            self._expected[before, it] = self._expected.get((before, it), 0.0) + prob

    def _excess(self, pair: tuple[str, str]) -> float:
        """How much too often it came, in standard deviations."""
        expected = self._expected.get(pair, 0.0)
        return (self._seen[pair] - expected) / math.sqrt(1 + expected)

    @property
    def worst(self) -> Martingale:
        """Of the scores of texts alone."""
        return min(self.likelihood, self.learned, self.repeated, key=lambda it: it.p_value)

    @property
    def factor(self) -> float:
        """How many times as often as told those came that came too often; 0 if none stands out."""
        pairs = [it for it in self._expected if self._excess(it) > 3]
        expected = sum(self._expected[it] for it in pairs)
        return sum(self._seen[it] for it in pairs) / (expected or 1.0)


def looked_up(said: str, tokens: Iterable[str]) -> str:
    """The token after the latest of the longest earlier matches of the end; "" if there is none."""
    follows = ""
    for size in MATCH_SIZES:
        if (place := said.rfind(said[-size:], 0, -1)) < 0:
            break
        follows = said[place + size :]
    return max((it for it in tokens if follows.startswith(it)), key=len, default="")


def known(place: Place, power: float, beyond: bool) -> dict[str, float]:
    """What the token must follow, given that it is known."""
    tops = {it: power * log for it, log in place.top.items() if not IS_ODD.fullmatch(it)}
    weights = {it: math.exp(log) for it, log in tops.items()}
    if beyond:
        weights[BEYOND] = max(0.0, 1 - sum(weights.values()))
    total = sum(weights.values())
    return {it: weight / total for it, weight in weights.items() if total}
