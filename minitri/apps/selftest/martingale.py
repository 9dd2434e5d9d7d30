"""The odds that scores of tokens come far from their means by chance: the bound of all tests here.

A score gives every token a number from 0 to 1. What the tokens of texts are off its mean, under
the distribution that they must follow, adds up to a martingale S: its mean is 0 and its variance V
known, whatever the texts, and for any l exp(l S - (exp |l| - 1 - |l|) V) is above 1 / a with odds
of at most a (Freedman 1975, Ville). Of several l the largest counts, with odds that many times as
high.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

RATES = [sign * 2.0**-k for k in range(13) for sign in (-1, 1)]
"""The l that are tried."""


@dataclass
class Martingale:
    """The sums of one score."""

    total: float = 0.0
    variance: float = 0.0
    num_tokens: int = 0

    def add(self, token: str, probs: Mapping[str, float], scores: Mapping[str, float]) -> None:
        """Takes in a token that must follow `probs`."""
        mean = sum(prob * scores[it] for it, prob in probs.items())
        self.total += scores[token] - mean
        self.variance += sum(prob * (scores[it] - mean) ** 2 for it, prob in probs.items())
        self.num_tokens += 1

    @property
    def mean(self) -> float:
        """How far a token is off on average."""
        return self.total / max(1, self.num_tokens)

    @property
    def p_value(self) -> float:
        """The odds, at most, that the sum of sound code comes so far from 0."""
        growth = {rate: math.exp(abs(rate)) - 1 - abs(rate) for rate in RATES}
        logs = [rate * self.total - growth[rate] * self.variance for rate in RATES]
        return math.exp(min(0.0, math.log(len(RATES)) - max(logs)))

    def noticed(self, p_value: float) -> float:
        """By how much a token must be off on average to get below a p-value with odds of 99.9 %."""
        low = 0.0
        high = 1e9
        while high - low > 1e-3:
            middle = (low + high) / 2
            is_enough = Martingale(middle, self.variance).p_value < p_value
            low, high = (low, middle) if is_enough else (middle, high)
        return (high + 3 * math.sqrt(self.variance)) / max(1, self.num_tokens)
