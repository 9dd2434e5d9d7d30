"""From logits to next-token distributions, and samples from them.

`probs_from_logits` is the one place where temperature and filters act, so that every level of a
cascade applies the very same filters. Filters compare with a cut-off value: tokens of equal
probability are kept or dropped together, and a distribution never depends on the order in which a
sort leaves ties. Pure functions: all randomness is an argument.

Legend: N rows, V vocab.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.settings import SamplingParams

LogProbs = tuple[float, tuple[tuple[int, float], ...]]
"""Of a token; and of the likeliest ones at its place, the best first."""

TOP_P_PREFIXES = (512, 4096)
"""Likeliest tokens that top-p looks at first; a row that needs more is sorted whole."""


def probs_from_logits(logits_NV: Tensor, params: SamplingParams) -> Tensor:
    """The next-token distribution of each row, (N, V), in the floating-point type of the logits.

    Temperature 0 gives the exact one-hot distribution of `greedy_tokens`. Otherwise the order is
    temperature, top-k, top-p, min-p, each filter on what the ones before it left, renormalised.
    """
    if params.temperature == 0:
        return greedy_probs(logits_NV)
    return filtered_probs(logits_NV, params, *params.numbers, sort_all=logits_NV.is_cuda)


def probs_by_tensor(logits_NV: Tensor, filters: SamplingParams, numbers_3: Tensor) -> Tensor:
    """`probs_from_logits` by numbers on the device (`SamplingParams.numbers`).

    Of `filters` only `filters.form` counts. Nothing is asked of the host, so a captured pass
    follows other numbers when the tensor is given others.
    """
    probs_NV = filtered_probs(logits_NV, filters, *numbers_3, sort_all=True)
    return torch.where(numbers_3[0] == 0, greedy_probs(logits_NV), probs_NV)


def probs_of_rows(logits_BNV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`probs_from_logits` of B rows, each with its own filters; (B, N, V)."""
    N = logits_BNV.shape[1]
    if len(set(params)) == 1:
        return probs_from_logits(logits_BNV.flatten(0, 1), params[0]).unflatten(0, (-1, N))
    pairs = zip(logits_BNV, params, strict=True)
    return torch.stack([probs_from_logits(logits_NV, own) for logits_NV, own in pairs])


def greedy_probs(logits_NV: Tensor) -> Tensor:
    """The one-hot distributions of `greedy_tokens`."""
    one = 1 + 0 * logits_NV.amax(-1, keepdim=True)  # NaN where the logits are not finite
    return torch.zeros_like(logits_NV).scatter_(-1, greedy_tokens(logits_NV).unsqueeze(-1), one)


def filtered_probs(
    logits_NV: Tensor,
    filters: SamplingParams,
    temperature: float | Tensor,
    top_p: float | Tensor,
    log_min_p: float | Tensor,
    *,
    sort_all: bool,
) -> Tensor:
    """`probs_from_logits` for a temperature above 0; by tensors nothing is asked of the host."""
    top_k, has_top_p, has_min_p = filters.form
    scores = (logits_NV - logits_NV.amax(-1, keepdim=True)) / temperature  # the best is 0
    if 0 < top_k < scores.shape[-1]:
        scores = _drop_below(scores, scores.topk(top_k).values[..., -1:])
    if has_top_p:
        scores = _drop_below(scores, _top_p_cutoff(scores, top_p, sort_all=sort_all))
    if has_min_p:
        scores = torch.where(scores < log_min_p, -math.inf, scores)
    return scores.softmax(-1)


def _drop_below(scores_NV: Tensor, cutoff_N1: Tensor) -> Tensor:
    return torch.where(scores_NV < cutoff_N1, -math.inf, scores_NV)


def _top_p_cutoff(scores_NV: Tensor, top_p: float | Tensor, *, sort_all: bool) -> Tensor:
    """Per row (N, 1), the score of the least likely token of the smallest set of mass `top_p`.

    `sort_all` on a GPU: whether a prefix is enough is a question the host would have to wait for.
    """
    log_total_N1 = scores_NV.logsumexp(-1, keepdim=True)
    V = scores_NV.shape[-1]
    if sort_all:
        best_NV = scores_NV.sort(-1, descending=True).values
        return _cutoff_within(best_NV, log_total_N1, top_p)[0]
    cutoff_N1 = torch.empty_like(log_total_N1)
    rows = torch.arange(len(scores_NV), device=scores_NV.device)
    for size in (*(size for size in TOP_P_PREFIXES if size < V), V):
        best = scores_NV[rows].topk(size).values
        cutoff, num_kept = _cutoff_within(best, log_total_N1[rows], top_p)
        cutoff_N1[rows] = cutoff
        rows = rows[num_kept.squeeze(1) == size]
        if not len(rows):
            break
    return cutoff_N1


def _cutoff_within(
    best: Tensor, log_total_N1: Tensor, top_p: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The same among the scores of the likeliest tokens (N, size), falling, and how many of these
    were kept, (N, 1) both; if it is all of them there may be more."""
    probs = (best - log_total_N1).exp()
    before = probs.cumsum(-1, dtype=torch.float64) - probs  # mass of the tokens ahead of each
    num_kept = (before < top_p).sum(-1, keepdim=True).clamp_min(1)
    return best.gather(-1, num_kept - 1), num_kept


def greedy_tokens(logits_NV: Tensor) -> Tensor:
    """The most likely token of each row, (N,); of equal ones the lowest id, on every device."""
    V = logits_NV.shape[-1]
    is_best = logits_NV == logits_NV.amax(-1, keepdim=True)
    ids = torch.arange(V, device=logits_NV.device)
    return torch.where(is_best, ids, V - 1).amin(-1)


def sample(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """One token per row, (N,), by inverse CDF of float64 numbers in [0, 1).

    Rows need not sum to 1. On a CPU a token of probability 0 is never sampled; on CUDA sums may be
    rounded in another order, at odds of 1e-11.
    """
    cdf_NV = probs_NV.double().cumsum(-1)
    targets_N1 = uniforms_N.double().unsqueeze(-1) * cdf_NV[..., -1:]
    tokens_N1 = torch.searchsorted(cdf_NV, targets_N1, right=True)
    return tokens_N1.squeeze(-1).clamp_max(probs_NV.shape[-1] - 1)


def pad_vocabulary(probs_BNV: Tensor, vocab_size: int) -> Tensor:
    """Gives tokens that a drafter does not have the probability 0."""
    missing = vocab_size - probs_BNV.shape[-1]
    return F.pad(probs_BNV, (0, missing)) if missing else probs_BNV


def log_probs(logits_NV: Tensor, tokens: list[int], num_top: int) -> list[LogProbs]:
    """Log-probabilities of N tokens and of the likeliest at each place, before all filters."""
    scores_NV = logits_NV.log_softmax(-1)
    tokens_N1 = torch.tensor(tokens, device=scores_NV.device).unsqueeze(1)
    own = scores_NV.gather(1, tokens_N1).squeeze(1).tolist()
    best, ids = (it.tolist() for it in scores_NV.topk(min(num_top, scores_NV.shape[1])))
    pairs = [tuple(zip(*row, strict=True)) for row in zip(ids, best, strict=True)]
    return list(zip(own, pairs, strict=True))
