"""A bound on the odds that scores of sampled tokens are this far from their expected values.

A score maps every token to a number from 0 to 1. The sum S of (score - expected score) over sampled
tokens is a martingale with mean 0 and a known variance V, whatever the texts: for any rate r,
exp(r S - (exp |r| - 1 - |r|) V) exceeds 1 / a with odds of at most a (Freedman 1975, Ville). The
best of several rates counts, with odds multiplied by their number."""

import math
from dataclasses import dataclass
from typing import Any

RATES = [2.0**-k for k in range(13)]  # absolute values of the rates r, of either sign


@dataclass
class Martingale:
    """Sums, over sampled tokens, of a score's deviations from expected values, and variances."""

    total: float = 0.0
    variance: float = 0.0
    num_tokens: int = 0

    def add(self, token: int, probs: Any, scores: Any) -> None:
        """Adds `scores[token]` less its mean under `probs`, which drew the token; both (V,)."""
        deviations = scores - probs @ scores
        self.total += float(deviations[token])
        self.variance += float(probs @ deviations**2)
        self.num_tokens += 1

    @property
    def mean(self) -> float:
        """Mean deviation of a token's score from its expected value."""
        return self.total / max(1, self.num_tokens)

    @property
    def p_value(self) -> float:
        """Upper bound on the odds that correct sampling gives a sum this far from 0."""
        best = max(r * abs(self.total) - (math.exp(r) - 1 - r) * self.variance for r in RATES)
        return math.exp(min(0.0, math.log(2 * len(RATES)) - best))
