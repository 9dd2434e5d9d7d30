"""A bound on the odds that scores of sampled tokens are this far from their expected values.

A score maps every token to a number from 0 to 1. The sum S of (score - expected score) over sampled
tokens is a martingale with mean 0 and a known variance V, whatever the texts: for any rate r,
exp(r S - (exp |r| - 1 - |r|) V) exceeds 1 / a with odds of at most a (Freedman 1975, Ville). The
best of several rates counts, with odds multiplied by their number.

Legend: N tokens, V vocab.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RATES = [2.0**-k for k in range(13)]
"""Absolute values of the rates r that are tried, with either sign."""


@dataclass
class Martingale:
    """Running sums of one score: deviation from its expected value, and variance."""

    total: float = 0.0
    variance: float = 0.0
    num_tokens: int = 0

    def add(self, token: str, probs: Mapping[str, float], scores: Mapping[str, float]) -> None:
        """Adds a token sampled from `probs`."""
        mean = sum(prob * scores[name] for name, prob in probs.items())
        self.total += scores[token] - mean
        self.variance += sum(prob * (scores[name] - mean) ** 2 for name, prob in probs.items())
        self.num_tokens += 1

    def add_rows(self, tokens_N: "Tensor", probs_NV: "Tensor", scores_NV: "Tensor") -> None:
        """Adds tokens, each sampled from its row of `probs_NV`."""
        deviation_NV = scores_NV - (probs_NV * scores_NV).sum(1, keepdim=True)
        self.total += float(deviation_NV.gather(1, tokens_N.unsqueeze(1)).double().sum())
        self.variance += float((probs_NV * deviation_NV**2).sum(1).double().sum())
        self.num_tokens += len(tokens_N)

    @property
    def mean(self) -> float:
        """Mean deviation of a token's score."""
        return self.total / max(1, self.num_tokens)

    @property
    def p_value(self) -> float:
        """Upper bound on the odds that correct sampling gives a sum this far from 0."""
        best = max(r * abs(self.total) - (math.exp(r) - 1 - r) * self.variance for r in RATES)
        return math.exp(min(0.0, math.log(2 * len(RATES)) - best))
