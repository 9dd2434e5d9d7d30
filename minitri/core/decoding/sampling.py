"""From logits to next-token distributions, and samples from them.

Temperature, top-k, top-p and min-p act here alone, the same for every level of a cascade. Tokens of
equal probability are kept or dropped together. Pure functions: all randomness is an argument.
`sample` takes uniform numbers, `gumbel_argmax` noise keyed by (seed, position, token), so that a
seed gives one text for all methods. That noise is computed from a 64-bit key by SplitMix64 (Steele
et al. 2014), only for tokens with a probability above 0.
Legend: B rows of the batch, N rows or places, V vocab, M likeliest tokens.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.core.settings import SamplingParams
from minitri.core.stats import LogProbs

TOP_P_PREFIXES = (512, 4096)  # likeliest tokens that top-p tries before it sorts a whole row
# SplitMix64's constants 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed
# numbers: int64 tensors wrap around as unsigned arithmetic does.
_STEP = -7046029254386353131
_MIX1 = -4658895280553007687
_MIX2 = -7723592293110705685


def probs_from_logits(logits_NV: Tensor, sampling: SamplingParams) -> Tensor:
    """Next-token distributions (N, V) of logits by the sampling settings of one text.
    Temperature (0 is exactly one-hot), then top-k, top-p and min-p, each on what is left."""
    if sampling.temperature == 0:
        return greedy_probs(logits_NV)
    return filtered_probs(logits_NV, sampling, sampling.numbers, sort_all=logits_NV.is_cuda)


def probs_by_tensor(logits_BNV: Tensor, sampling: SamplingParams, numbers_B3: Tensor) -> Tensor:
    """Next-token distributions (B, N, V) of logits, without a host sync, for captured CUDA graphs.
    `sampling` says top-k and which filters act; `numbers_B3`: temperature, top-p, log min-p."""
    temperature, top_p, log_min_p = numbers_B3.T[..., None, None]  # each (B, 1, 1)
    numbers = (temperature.to(logits_BNV.dtype), top_p, log_min_p.to(logits_BNV.dtype))
    probs_BNV = filtered_probs(logits_BNV, sampling, numbers, sort_all=True)
    return torch.where(temperature == 0, greedy_probs(logits_BNV), probs_BNV)


def probs_of_rows(
    logits_BNV: Tensor,
    sampling: Sequence[SamplingParams],
    probs: Callable[[Tensor, SamplingParams], Tensor] | None = None,
) -> Tensor:
    """Distributions (B, N, V) by each row's settings; `probs` replaces `probs_from_logits`."""
    probs = probs or probs_from_logits
    N = logits_BNV.shape[1]
    if all(row == sampling[0] for row in sampling):
        return probs(logits_BNV.flatten(0, 1), sampling[0]).unflatten(0, (-1, N))
    return torch.stack([probs(*pair) for pair in zip(logits_BNV, sampling, strict=True)])


def greedy_probs(logits_NV: Tensor) -> Tensor:
    """One-hot distributions (N, V) of the likeliest tokens by logits; the lowest id wins a tie."""
    best_N1, tokens_N1 = logits_NV.max(-1, keepdim=True)
    ones_N1 = 1 + 0 * best_N1  # NaN where the logits are not finite
    return torch.zeros_like(logits_NV).scatter_(-1, tokens_N1, ones_N1)


def filtered_probs(
    logits_NV: Tensor,
    sampling: SamplingParams,
    numbers: Iterable[float | Tensor],
    *,
    sort_all: bool,
) -> Tensor:
    """Distributions (N, V) of logits by `numbers`: temperature > 0, top-p and log min-p.
    `sampling` says top-k and which filters act; `sort_all` sorts whole rows: no host sync."""
    top_k, has_top_p, has_min_p = sampling.form
    temperature, top_p, log_min_p = numbers
    scores = (logits_NV - logits_NV.amax(-1, keepdim=True)) / temperature  # the highest is 0
    if 0 < top_k < scores.shape[-1]:
        cutoff_N1 = scores.topk(top_k).values[..., -1:]
        scores = scores.masked_fill(scores < cutoff_N1, -math.inf)
    if has_top_p:
        cutoff_N1 = _top_p_cutoff(scores, top_p, sort_all=sort_all)
        scores = scores.masked_fill(scores < cutoff_N1, -math.inf)
    if has_min_p:
        scores = scores.masked_fill(scores < log_min_p, -math.inf)
    return scores.softmax(-1)


def _top_p_cutoff(scores_NV: Tensor, top_p: float | Tensor, *, sort_all: bool) -> Tensor:
    """The lowest of the scaled logits `scores_NV` that top-p keeps in each row: (N, 1).
    `sort_all` sorts whole rows, without a host sync; else the likeliest tokens are tried first."""
    V = scores_NV.shape[-1]
    log_totals_N1 = scores_NV.logsumexp(-1, keepdim=True)
    for size in (*TOP_P_PREFIXES, V):
        is_all = sort_all or size >= V
        best = scores_NV.sort(descending=True).values if is_all else scores_NV.topk(size).values
        probs = (best - log_totals_N1).exp()
        before = running_sums(probs) - probs  # mass of the likelier tokens
        is_kept = (before < top_p) | (top_p >= 1)  # at top_p 1 all are, but for rounding
        num_kept_N1 = is_kept.sum(-1, keepdim=True).clamp_min(1)
        if is_all or (num_kept_N1 < size).all():
            break
    return best.gather(-1, num_kept_N1 - 1)


def sample(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """Samples one token per row (N,) by inverse CDF, from float64 numbers in [0, 1).
    Rows need not sum to 1. A token of probability 0 is sampled with odds of 1e-11 on CUDA only."""
    cdf_NV = running_sums(probs_NV)
    targets_N1 = uniforms_N.double().unsqueeze(-1) * cdf_NV[..., -1:]
    tokens_N1 = torch.searchsorted(cdf_NV, targets_N1, right=True)
    return tokens_N1.squeeze(-1).clamp_max(probs_NV.shape[-1] - 1)


def running_sums(numbers: Tensor) -> Tensor:
    """Cumulative sums of the last dimension, float64; on a GPU in parts, to use all its cores."""
    return sums_by_parts(numbers) if numbers.is_cuda else numbers.cumsum(-1, dtype=torch.float64)


def sums_by_parts(numbers: Tensor, part: int = 128) -> Tensor:
    """Cumulative sums of the last dimension, float64, computed in parts of `part` numbers."""
    V = numbers.shape[-1]
    parts = F.pad(numbers, (0, -V % part)).unflatten(-1, (-1, part))
    sums = parts.cumsum(-1, dtype=torch.float64)
    before = F.pad(sums[..., :-1, -1].cumsum(-1), (1, 0))
    return (sums + before.unsqueeze(-1)).flatten(-2)[..., :V]


def pad_vocabulary(probs_BNV: Tensor, vocab_size: int) -> Tensor:
    """Extends distributions to `vocab_size` tokens by zeros, as a drafter may lack some tokens."""
    missing = vocab_size - probs_BNV.shape[-1]
    return F.pad(probs_BNV, (0, missing)) if missing else probs_BNV


def log_probs(logits_NV: Tensor, tokens: list[int], num_top: int) -> list[LogProbs]:
    """For each n: the log-probability of `tokens[n]` by row n of logits, and a tuple of
    (token id, log-probability) of the `num_top` likeliest."""
    scores_NV = logits_NV.log_softmax(-1)
    scores = scores_NV[range(len(tokens)), tokens].tolist()
    best_NM, ids_NM = scores_NV.topk(min(num_top, scores_NV.shape[1]))
    rows = zip(ids_NM.tolist(), best_NM.tolist(), strict=True)
    return list(zip(scores, [tuple(zip(*row, strict=True)) for row in rows], strict=True))


def gumbel_argmax(probs: Tensor, keys: Tensor) -> Tensor:
    """Samples tokens from p, (..., V), by int64 keys (...): argmax(log p + Gumbel noise)."""
    return gumbel_scores(probs, keys).argmax(-1)


def gumbel_scores(probs: Tensor, keys: Tensor) -> Tensor:
    """log p + Gumbel noise of int64 keys (...) for all tokens, (..., V) float64; -inf if p is 0."""
    if probs.is_cuda:  # where `nonzero` would make the host wait
        return dense_scores(probs, keys)
    support = probs.nonzero(as_tuple=True)  # a filtered distribution has few such tokens
    scores = torch.full_like(probs, -math.inf, dtype=torch.float64)
    scores[support] = probs[support].double().log() + gumbel(keys[support[:-1]], support[-1])
    return scores


def dense_scores(probs: Tensor, keys: Tensor) -> Tensor:
    """log p + Gumbel noise of int64 keys (...) for all tokens, (..., V) float64; no host sync."""
    numbers = torch.arange(probs.shape[-1], device=probs.device)
    return probs.double().log() + gumbel(keys.unsqueeze(-1), numbers)


def gumbel(keys: Tensor, numbers: Tensor) -> Tensor:
    """Gumbel noise, float64, of int64 keys and numbers such as token ids, which broadcast."""
    return -(-hashed_uniforms(keys, numbers).log()).log()


def hashed_uniforms(keys: Tensor, numbers: Tensor) -> Tensor:
    """A float64 in (0, 1) for each int64 key and number, by 52 bits of SplitMix64's output."""
    return (_shift_right(splitmix(keys + numbers * _STEP), 12).double() + 0.5) * 2.0**-52


def noise_keys(seed: int, positions: Tensor) -> Tensor:
    """Int64 keys of Gumbel noise at positions; `seed` is hashed, so near seeds share no keys."""
    return splitmix(splitmix(torch.tensor(seed)) + positions)


def splitmix(states: Tensor) -> Tensor:
    """The output of the generator SplitMix64 after each of these states, int64."""
    x = states + _STEP
    x = (x ^ _shift_right(x, 30)) * _MIX1
    x = (x ^ _shift_right(x, 27)) * _MIX2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, whose `>>` would copy the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
