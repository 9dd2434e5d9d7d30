"""Attention by prefix + block: every query sees the whole cached prefix; a T x T rule holds inside the block.

A forward pass brings T new tokens per row, whose keys and values already stand in the cache right behind the row's
prefix. So prefill, decoding, verification and trees are one call with different T and rules. The rule is causal
(`None`) or a (T, T) boolean tensor, True where a query (row) may see a block key (column).

It is made for inference: behind a prefix gradients are wrong. How it is computed depends on the device, on T and on the
length of the prefix:

- `attend_math` is the oracle of the tests: plain formulas in float32, or float64 for float64 tensors;
- on CPU a short block folds the G query heads of a KV head and its T tokens into the rows of one matrix, so that K and
  V are read once per KV head, as they lie; the rule touches only the last T slots. One call of PyTorch's flash kernel
  takes prefix and block, cut in pieces so that all cores have work; behind a very long prefix two matmuls are faster,
  which materialise the scores;
- on CPU a long block, of a prefill, runs the flash kernel over the prefix and over the block, merged by log-sum-exp;
- on CUDA one fused kernel takes prefix and block with bottom-right causal alignment; short blocks of a model on a GPU
  go by `attention_cuda.py` instead.

Legend: B batch, S slots, K KV heads, H query heads, G = H / K, D head dim, T new tokens, R = G T, P = PIECES.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

HAS_TILES: bool = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
"""Whether the processor multiplies tiles of matrices (AMX), of which the flash kernel makes more than other matmuls."""

SHORT_BLOCK = 24
"""Longest block, in tokens, whose queries are folded: those of decoding with ordinary gammas, not of a prefill."""

MATMUL_BLOCK = 4 if HAS_TILES else SHORT_BLOCK
MATMUL_PREFIX = 24576 if HAS_TILES else 5120
"""Blocks up to so many tokens behind more slots than that (prefix + block) materialise their scores on CPU, but for
float16."""

STRIDE = 64
"""Materialised scores meet the prefix in multiples of this many slots. oneDNN compiles every matmul shape and stride it
sees and keeps the code, 0.7 MB each, so shapes that grew with every token would take more memory than the cache."""

SPLIT_PREFIX = 1536
"""Behind more slots than that, short blocks leave the flash kernel too few rows of queries to share out among cores."""

PIECES = 4
"""Parts of a long prefix that are read side by side; fixed, so that results do not depend on the number of cores."""

SAFE_TOTAL = 1e30
"""The sum of the exponentials of all scores, and its inverse, must be smaller: then none has overflowed, and those that
vanished do not count."""

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend(
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    prefix_lengths: list[int],
    rule_TT: Tensor | None = None,
    lengths_B: Tensor | None = None,  # noqa: ARG001 (for `attention_cuda.py`, which has the same signature)
) -> Tensor:
    """Softmax attention of a block, (B, T, H, D), in the dtype of the queries.

    `keys_BKSD` and `values_BKSD` are the cache of one layer; row b is valid in its first `prefix_lengths[b] + T`
    slots, the last T of which are the block. What stands behind them changes nothing. The scale is 1 / sqrt(D).
    `lengths_B` are the prefix lengths as kernels see them, which this function has no need of.
    """
    one_row = _fused_row if q_BTHD.device.type == "cuda" else _cpu_row
    return _by_row(one_row, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)


def attend_math(
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    prefix_lengths: list[int],
    rule_TT: Tensor | None = None,
) -> Tensor:
    """The oracle: the same contract as `attend`, by the textbook."""
    return _by_row(_math_row, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)


def _by_row(one_row, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT) -> Tensor:  # type: ignore[no-untyped-def]
    """Rows of equal length are one row with B times as many KV heads; others have their turn one after the other."""
    B, T, H, D = q_BTHD.shape
    K = keys_BKSD.shape[1]
    if min(prefix_lengths) < max(prefix_lengths):
        rows = (
            _by_row(
                one_row,
                q_BTHD[b : b + 1],
                keys_BKSD[b : b + 1],
                values_BKSD[b : b + 1],
                [prefix],
                rule_TT,
            )
            for b, prefix in enumerate(prefix_lengths)
        )
        return torch.cat(list(rows))
    q_KGTD = q_BTHD.view(B, T, K, H // K, D).permute(0, 2, 3, 1, 4).flatten(0, 1)
    out_KGTD = one_row(
        q_KGTD, keys_BKSD.flatten(0, 1), values_BKSD.flatten(0, 1), prefix_lengths[0] + T, rule_TT
    )
    return out_KGTD.view(B, K, H // K, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, H, D)


def block_rule(T: int, rule_TT: Tensor | None, device: torch.device) -> Tensor:
    """The rule as a boolean tensor (T, T): causal where none is given."""
    if rule_TT is not None:
        return rule_TT
    return torch.ones(T, T, dtype=torch.bool, device=device).tril_()


def _math_row(
    q_KGTD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, rule_TT: Tensor | None
) -> Tensor:
    T, D = q_KGTD.shape[2:]
    keys_KSD, values_KSD = keys_KSD[:, :end], values_KSD[:, :end]
    exact = torch.promote_types(q_KGTD.dtype, torch.float32)
    q, k, v = q_KGTD.to(exact), keys_KSD[:, None].to(exact), values_KSD[:, None].to(exact)
    scores_KGTS = q @ k.transpose(-1, -2) / math.sqrt(D)
    scores_KGTS[..., -T:].masked_fill_(~block_rule(T, rule_TT, q.device), -math.inf)
    return (scores_KGTS.softmax(-1) @ v).to(q_KGTD.dtype)


def _cpu_row(
    q_KGTD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, rule_TT: Tensor | None
) -> Tensor:
    T = q_KGTD.shape[2]
    if T > SHORT_BLOCK:
        return _long_row(q_KGTD, keys_KSD, values_KSD, end, rule_TT)
    has_range = q_KGTD.dtype != torch.float16  # for the exponentials of all scores
    if (
        T <= MATMUL_BLOCK
        and end > MATMUL_PREFIX
        and whole_strides(end) <= keys_KSD.shape[1]
        and has_range
    ):
        return _matmul_row(q_KGTD, keys_KSD, values_KSD, end, rule_TT)
    return _short_row(q_KGTD, keys_KSD, values_KSD, end, rule_TT)


def whole_strides(num_slots: int) -> int:
    """The next multiple of STRIDE; caches that have so many slots can always be read in whole strides."""
    return -(-num_slots // STRIDE) * STRIDE


def _matmul_row(
    q_KGTD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, rule_TT: Tensor | None
) -> Tensor:
    """Per KV head, because a batched matmul over heads would first copy the prefix: its heads lie `capacity` apart.

    Scores are K q^T, slots first, so that the matmul reads keys as they lie instead of repacking them; PIECES of the
    slots run side by side. For the softmax, STRIDE slots lie side by side, so that its reductions are long vectors; it
    leaves the largest score where it is, which saves two of four passes, and gives way to flash should that overflow.
    Scores, their exponentials and sums over every STRIDE-th slot are stored in the dtype of the queries, so bfloat16
    rounds them, which flash does not. Slots behind `end` may be read, but their probabilities are 0.
    """
    K, G, T, D = q_KGTD.shape
    R, width, cut = G * T, whole_strides(end), end // STRIDE * STRIDE
    exact = torch.promote_types(q_KGTD.dtype, torch.float32)
    q_KDR = (q_KGTD * (1 / math.sqrt(D))).reshape(K, R, D).transpose(1, 2)
    scores_KSR = q_KDR.new_empty(K, width, R)
    for q_DR, keys_SD, scores_SR in zip(q_KDR, keys_KSD, scores_KSR, strict=True):
        pieces_PSD = keys_SD[:width].view(PIECES, -1, D)
        torch.bmm(pieces_PSD, q_DR.expand(PIECES, D, R), out=scores_SR.view(PIECES, -1, R))
    scores_KSR[:, end:] = -math.inf
    if T > 1:
        unseen_TGT = ~block_rule(T, rule_TT, q_KDR.device).t()[
            :, None
        ]  # keys before queries, the same for all G
        scores_KSR[:, end - T : end].view(K, T, G, T).masked_fill_(unseen_TGT, -math.inf)
    total_KR = (
        scores_KSR.exp_().view(K, -1, STRIDE * R).sum(1).view(K, STRIDE, R).sum(1, dtype=exact)
    )
    if not 1 / SAFE_TOTAL < total_KR.min() <= total_KR.max() < SAFE_TOTAL:
        return _short_row(q_KGTD, keys_KSD, values_KSD, end, rule_TT)
    out_KRD = q_KDR.new_empty(K, R, D, dtype=exact)
    for probs_SR, values_SD, out_RD in zip(scores_KSR, values_KSD, out_KRD, strict=True):
        probs_PRS = probs_SR[:cut].view(PIECES, -1, R).transpose(1, 2)
        torch.sum(
            torch.bmm(probs_PRS, values_SD[:cut].view(PIECES, -1, D)), 0, dtype=exact, out=out_RD
        )
    if (
        cut < end
    ):  # the last stride by itself, as far as it is valid: behind it values may be anything, NaN too
        rest_KSD = F.pad(values_KSD[:, cut:end], (0, 0, 0, width - end))
        out_KRD += scores_KSR[:, cut:].transpose(1, 2) @ rest_KSD
    return (out_KRD / total_KR.unsqueeze(2)).to(q_KGTD.dtype).view(K, G, T, D)


def _short_row(
    q_KGTD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, rule_TT: Tensor | None
) -> Tensor:
    """One flash call over windows of the prefix, of which the last ends with the block. Windows are equally long and
    begin equally far apart, so where the number of slots cannot be divided they overlap, and the bias hides that."""
    K, G, T, D = q_KGTD.shape
    pieces = PIECES if end > max(SPLIT_PREFIX, PIECES * T) else 1
    apart = end // pieces
    width = end - (pieces - 1) * apart
    k, v = (
        x[:, :end].unfold(1, width, apart).transpose(2, 3) for x in (keys_KSD, values_KSD)
    )  # (K, P, width, D)
    shape = (T, G, pieces, width, apart, q_KGTD.dtype)
    bias = _causal_bias(*shape) if rule_TT is None else _bias(*shape, rule_TT)
    out_KPRD, lse_KPR = _flash_cpu(
        q_KGTD.reshape(K, 1, G * T, D).expand(K, pieces, G * T, D), k, v, attn_mask=bias
    )
    if pieces > 1:
        out_KPRD = (out_KPRD * lse_KPR.softmax(1).unsqueeze(3)).sum(1).to(q_KGTD.dtype)
    return out_KPRD.view(K, G, T, D)


def _bias(
    T: int,
    G: int,
    pieces: int,
    width: int,
    apart: int,
    dtype: torch.dtype,
    rule_TT: Tensor | None = None,
) -> Tensor | None:
    """What `_short_row` adds to the scores of every KV head, (1, P, R, width): minus infinity in the last window where
    the rule forbids, in the others where the next one begins. None if that is nowhere."""
    if T == 1 and width == apart:
        return None
    with torch.inference_mode(False):  # the next pass may be one with gradients
        bias_PTW = torch.zeros(pieces, T, width, dtype=dtype)
        bias_PTW[:-1, :, apart:] = -math.inf
        bias_PTW[-1, :, width - T :].masked_fill_(
            ~block_rule(T, rule_TT, bias_PTW.device), -math.inf
        )
        return bias_PTW.repeat(1, G, 1).unsqueeze(0)


_causal_bias = functools.lru_cache(maxsize=8)(_bias)  # every layer of a pass adds the same


def _long_row(
    q_KGTD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, rule_TT: Tensor | None
) -> Tensor:
    K, G, T, D = q_KGTD.shape
    keys_KSD, values_KSD = keys_KSD[:, :end], values_KSD[:, :end]
    # In the block a query head needs its own T x T rule; a KV head serves its G query heads without being copied.
    k = keys_KSD[:, None, -T:].expand(K, G, T, D)
    v = values_KSD[:, None, -T:].expand(K, G, T, D)
    if rule_TT is None:
        block, block_lse = _flash_cpu(q_KGTD, k, v, is_causal=True)
    else:
        bias_TT = torch.zeros(T, T, dtype=q_KGTD.dtype).masked_fill_(~rule_TT, -math.inf)
        block, block_lse = _flash_cpu(q_KGTD, k, v, attn_mask=bias_TT)
    if end == T:
        return block
    # The prefix has no rule, so the group folds into rows, and the kernel repacks K and V once per KV head.
    prefix_RD, lse_R = _flash_cpu(
        q_KGTD.reshape(1, K, G * T, D), keys_KSD[None, :, :-T], values_KSD[None, :, :-T]
    )
    return merge_by_lse(prefix_RD.view(K, G, T, D), lse_R.view(K, G, T), block, block_lse)


def merge_by_lse(left: Tensor, left_lse: Tensor, right: Tensor, right_lse: Tensor) -> Tensor:
    """Attention over the union of two disjoint key sets, from the outputs (..., T, D) and log-sum-exps (..., T)."""
    share = torch.sigmoid(right_lse - left_lse).unsqueeze(-1).to(left.dtype)
    return torch.lerp(left, right, share)


def _fused_row(
    q_KGTD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, rule_TT: Tensor | None
) -> Tensor:
    K, G, T, D = q_KGTD.shape
    q = q_KGTD.reshape(1, K * G, T, D)
    k, v, S = keys_KSD[None, :, :end], values_KSD[None, :, :end], end
    mask = None
    if rule_TT is not None:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device)
        mask[:, S - T :] = rule_TT
    elif T > 1:
        from torch.nn.attention.bias import causal_lower_right  # here, because it takes seconds

        mask = causal_lower_right(T, S)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=G > 1)
    return out.view(K, G, T, D)
