"""The chi-square test that all statistical tests share."""

import torch
from torch import Tensor

FALSE_ALARM = 1e-5
"""Odds of each test."""
LEAST = 1.25e-3
"""Rarer outcomes are put together; of 4,000 every cell expects five or more."""


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Odds that a sound engine is as far off; an outcome of probability 0 makes it 0."""
    if counts[probs == 0].sum() > 0:
        return 0.0
    observed, expected = cells(counts, probs), cells(probs, probs) * counts.sum()
    statistic = ((observed - expected) ** 2 / expected).sum()
    halves = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))


def cells(values: Tensor, probs: Tensor) -> Tensor:
    """Values of the common outcomes, and the sum of those of the rare ones."""
    is_common = probs >= LEAST
    is_rare = (probs > 0) & ~is_common
    rare = [values[is_rare].sum().view(1)] if is_rare.any() else []
    return torch.cat([values[is_common], *rare])
