"""Next-token laws and draws from them. Pure functions: all randomness is an argument.

`probs_from_logits` is the one place where temperature and filters act, so that every level of a cascade can apply the
very same law. Filters compare with a cut-off value, so tokens of equal probability are kept or dropped together and a
law never depends on the order in which a sort leaves ties.

Legend: N rows, V vocab.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minitri.settings import SamplingParams

TOP_P_PREFIX = 512
"""Tokens looked at first for top-p; a row whose prefix does not reach the mass is sorted whole."""


def probs_from_logits(
    logits_NV: Tensor, params: SamplingParams, numbers_3: Tensor | None = None
) -> Tensor:
    """The next-token law of each row, (N, V), in the floating-point type of the logits.

    Temperature 0 gives the exact one-hot law of `greedy_tokens`. Otherwise the order is temperature, top-k, top-p,
    min-p, each filter on the law that the ones before it left, and the survivors are renormalised.

    `numbers_3`, see `numbers_of`, replace those of `params`, of which then only the form counts, and nothing is asked
    of the host. So a captured step follows other numbers when the tensor is given others. The logits must then be
    float32 or better: a GPU would round the temperature to what they are.
    """
    if numbers_3 is not None:
        warm = _warm_law(logits_NV, params, numbers_3)  # means nothing at temperature 0
        return torch.where(numbers_3[0] == 0, _greedy_law(logits_NV), warm)
    return _warm_law(logits_NV, params) if params.temperature else _greedy_law(logits_NV)


def _greedy_law(logits_NV: Tensor) -> Tensor:
    one = 1 + 0 * logits_NV.amax(-1, keepdim=True)  # not a number where the logits are not finite
    return torch.zeros_like(logits_NV).scatter_(-1, greedy_tokens(logits_NV).unsqueeze(-1), one)


def _warm_law(logits_NV: Tensor, params: SamplingParams, numbers_3: Tensor | None = None) -> Tensor:
    temperature, top_p, log_min_p = numbers_of(params) if numbers_3 is None else numbers_3
    scores = (logits_NV - logits_NV.amax(-1, keepdim=True)) / temperature  # the best is 0
    if 0 < params.top_k < scores.shape[-1]:
        scores = _drop_below(scores, scores.topk(params.top_k).values[..., -1:])
    if params.top_p < 1:
        scores = _drop_below(
            scores, _top_p_cutoff(scores, top_p, at_once=numbers_3 is not None or scores.is_cuda)
        )
    if params.min_p > 0:
        scores = scores.masked_fill(scores < log_min_p, -math.inf)
    return scores.softmax(-1)


def numbers_of(params: SamplingParams) -> tuple[float, float, float]:
    """Temperature, top-p, and the logarithm of min-p."""
    return params.temperature, params.top_p, math.log(params.min_p) if params.min_p else -math.inf


def _drop_below(scores_NV: Tensor, cutoff_N1: Tensor) -> Tensor:
    return scores_NV.masked_fill(scores_NV < cutoff_N1, -math.inf)


def _top_p_cutoff(scores_NV: Tensor, top_p: float | Tensor, *, at_once: bool) -> Tensor:
    """Per row (N, 1), the score of the least likely token of the smallest set with mass `top_p`."""
    log_total = scores_NV.logsumexp(-1, keepdim=True)
    V = scores_NV.shape[-1]
    # A GPU sorts all at once: whether a prefix is enough the host would have to wait for.
    for size in (V,) if at_once else (min(TOP_P_PREFIX, V), V):
        best = scores_NV.topk(size).values  # (N, size), falling
        probs = (best - log_total).exp()
        before = probs.cumsum(-1, dtype=torch.float64) - probs  # mass of the tokens ahead of each
        num_kept = (before < top_p).sum(-1, keepdim=True).clamp_min(1)
        if size == V or bool((num_kept < size).all()):
            break
    return best.gather(-1, num_kept - 1)


def greedy_tokens(logits_NV: Tensor) -> Tensor:
    """The most likely token of each row, (N,); of several equal ones the lowest id, on every device."""
    V = logits_NV.shape[-1]
    is_best = logits_NV == logits_NV.amax(-1, keepdim=True)
    ids = torch.arange(V, device=logits_NV.device)
    return torch.where(is_best, ids, V - 1).amin(-1)


def sample(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """One token per row, (N,), by inverse CDF of float64 numbers in [0, 1).

    On a CPU a token of probability 0 is never drawn; on CUDA sums may be rounded in another order, at odds of 1e-11.
    """
    cdf_NV = probs_NV.double().cumsum(-1)
    targets_N1 = uniforms_N.double().unsqueeze(-1) * cdf_NV[..., -1:]
    return (
        torch.searchsorted(cdf_NV, targets_N1, right=True)
        .squeeze(-1)
        .clamp_max(probs_NV.shape[-1] - 1)
    )
