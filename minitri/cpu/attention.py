"""Attention on a CPU: the kernel depends on the length of the block and of the prefix.

- A short block is folded: the G query heads of a KV head and its T tokens are the rows of one
  matrix, so K and V are read once per KV head, as they lie. One call of PyTorch's flash kernel
  takes prefix and block, cut in windows so that all cores have work.
- Behind a very long prefix, two matmuls that materialise the scores are faster than that.
- A long block, of a prefill, runs the flash kernel over the prefix and over the block, merged by
  log-sum-exp.

Legend: B batch, S slots, K KV heads (of all rows), H query heads, G = H / K, D head dim, T new
tokens, R = G T, P = PIECES.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.model.attention import block_rule, fold, merge_by_lse, row_by_row
from minitri.model.cache import STRIDE, round_up_to_stride

HAS_TILES: bool = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
"""Whether the processor multiplies tiles of matrices (AMX). The flash kernel gains most by it."""

SHORT_BLOCK = 24
"""Longest block, in tokens, that is folded: those of decoding with ordinary gammas."""

MATMUL_BLOCK = 4 if HAS_TILES else SHORT_BLOCK
MATMUL_PREFIX = 24576 if HAS_TILES else 5120
"""Blocks up to so many tokens behind more slots than that (prefix + block) materialise scores."""

SPLIT_PREFIX = 1536
"""With more slots than that, flash runs over PIECES windows: else too few rows for all cores."""

PIECES = 4
"""Parts of a long prefix that are read side by side. Fixed: results do not depend on the cores."""

SAFE_TOTAL = 1e30
"""The sum of the exponentials of all scores, and its inverse, must be smaller: then none has
overflowed, and those that vanished do not count."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend_cpu(
    q_BTHD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, prefix_lengths: list[int],
    rule_TT: Tensor | None = None, lengths_B: Tensor | None = None,  # noqa: ARG001 (the contract's)
) -> Tensor:  # fmt: skip
    """Attention of a block on a CPU; the contract is `model.attention.Attend`.

    Rows of equal length are computed as one row with B times as many KV heads.
    """
    if min(prefix_lengths) < max(prefix_lengths):
        return row_by_row(attend_cpu, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)
    B, T, H, D = q_BTHD.shape
    K, S = keys_BKSD.shape[1:3]
    end = prefix_lengths[0] + T
    has_range = q_BTHD.dtype != torch.float16  # for the exponentials of all scores
    kernel = flash_prefill if T > SHORT_BLOCK else flash_windows
    if T <= MATMUL_BLOCK and end > MATMUL_PREFIX and has_range and round_up_to_stride(end) <= S:
        kernel = materialised_scores
    q_KRD = fold(q_BTHD, K).flatten(0, 1)
    out_KGTD = kernel(q_KRD, keys_BKSD.flatten(0, 1), values_BKSD.flatten(0, 1), end, T, rule_TT)
    return out_KGTD.view(B, K, H // K, T, D).permute(0, 3, 1, 2, 4).flatten(2, 3)


def materialised_scores(
    q_KRD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, T: int, rule_TT: Tensor | None
) -> Tensor:
    """Scores in memory, one matmul per KV head: a batched one would copy the prefix first, since
    its heads lie `capacity` apart. It returns (K, G, T, D), as all kernels here do.

    Scores are K q^T, slots first, so that the matmul reads keys as they lie; PIECES of the slots
    run side by side. Matmuls see whole strides only, because oneDNN compiles every shape it meets
    and keeps 0.7 MB of code for each. For the softmax, STRIDE slots lie side by side, so that its
    reductions are long vectors. It does not subtract the largest score, which saves two of four
    passes; should that overflow, flash takes over. Scores, exponentials and sums over every
    STRIDE-th slot have the dtype of the queries, so bfloat16 rounds them, which flash does not.
    Slots behind `end` may be read, but their probabilities are 0.
    """
    K, R, D = q_KRD.shape
    width, cut = round_up_to_stride(end), end // STRIDE * STRIDE
    exact = torch.promote_types(q_KRD.dtype, torch.float32)
    q_KDR = (q_KRD * (1 / math.sqrt(D))).transpose(1, 2)
    scores_KSR = q_KDR.new_empty(K, width, R)
    for q_DR, keys_SD, scores_SR in zip(q_KDR, keys_KSD, scores_KSR, strict=True):
        pieces_PSD = keys_SD[:width].view(PIECES, -1, D)
        torch.bmm(pieces_PSD, q_DR.expand(PIECES, D, R), out=scores_SR.view(PIECES, -1, R))
    scores_KSR[:, end:] = -math.inf
    if T > 1:
        unseen_TGT = ~block_rule(T, rule_TT, q_KDR.device).t().unsqueeze(1)  # keys before queries
        block_KTGT = scores_KSR[:, end - T : end].view(K, T, R // T, T)
        block_KTGT.masked_fill_(unseen_TGT, -math.inf)
    sums_KSR = scores_KSR.exp_().view(K, -1, STRIDE * R).sum(1).view(K, STRIDE, R)
    total_KR = sums_KSR.sum(1, dtype=exact)
    if not 1 / SAFE_TOTAL < total_KR.min() <= total_KR.max() < SAFE_TOTAL:
        return flash_windows(q_KRD, keys_KSD, values_KSD, end, T, rule_TT)
    out_KRD = q_KDR.new_empty(K, R, D, dtype=exact)
    for probs_SR, values_SD, out_RD in zip(scores_KSR, values_KSD, out_KRD, strict=True):
        probs_PRS = probs_SR[:cut].view(PIECES, -1, R).transpose(1, 2)
        parts_PRD = torch.bmm(probs_PRS, values_SD[:cut].view(PIECES, -1, D))
        torch.sum(parts_PRD, 0, dtype=exact, out=out_RD)
    if cut < end:  # the last stride apart, up to `end`: values behind it may be anything, NaN too
        rest_KSD = F.pad(values_KSD[:, cut:end], (0, 0, 0, width - end))
        out_KRD += scores_KSR[:, cut:].transpose(1, 2) @ rest_KSD
    return (out_KRD / total_KR.unsqueeze(2)).to(q_KRD.dtype).view(K, R // T, T, D)


def flash_windows(
    q_KRD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, T: int, rule_TT: Tensor | None
) -> Tensor:
    """One flash call over windows of prefix and block, the last of which ends with the block.

    Windows are equally long and begin equally far apart, so where the number of slots cannot be
    divided they overlap, and the bias hides what was seen before.
    """
    K, R, D = q_KRD.shape
    pieces = PIECES if end > max(SPLIT_PREFIX, PIECES * T) else 1
    apart = end // pieces
    width = end - (pieces - 1) * apart
    k_KPSD, v_KPSD = (
        slots[:, :end].unfold(1, width, apart).transpose(2, 3) for slots in (keys_KSD, values_KSD)
    )
    shape = (T, R // T, pieces, width, apart, q_KRD.dtype)
    bias = _causal_bias(*shape) if rule_TT is None else _bias(*shape, rule_TT)
    q_KPRD = q_KRD.unsqueeze(1).expand(K, pieces, R, D)
    out_KPRD, lse_KPR = _flash(q_KPRD, k_KPSD, v_KPSD, attn_mask=bias)
    if pieces > 1:
        out_KPRD = (out_KPRD * lse_KPR.softmax(1).unsqueeze(3)).sum(1).to(q_KRD.dtype)
    return out_KPRD.view(K, R // T, T, D)


def _bias(
    T: int, G: int, pieces: int, width: int, apart: int, dtype: torch.dtype,
    rule_TT: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """What `flash_windows` adds to the scores of every KV head, (1, P, R, width), or None.

    Minus infinity in the last window where the rule forbids, in the others where the next begins.
    """
    if T == 1 and width == apart:
        return None
    with torch.inference_mode(False):  # the next pass may be one with gradients
        bias_PTW = torch.zeros(pieces, T, width, dtype=dtype)
        bias_PTW[:-1, :, apart:] = -math.inf
        unseen_TT = ~block_rule(T, rule_TT, bias_PTW.device)
        bias_PTW[-1, :, width - T :].masked_fill_(unseen_TT, -math.inf)
        return bias_PTW.repeat(1, G, 1).unsqueeze(0)


_causal_bias = functools.lru_cache(maxsize=8)(_bias)  # every layer of a pass adds the same


def flash_prefill(
    q_KRD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, T: int, rule_TT: Tensor | None
) -> Tensor:
    """Flash over a long block, each query head by itself, and over the prefix, folded."""
    q_KGTD = q_KRD.unflatten(1, (-1, T))
    k_KGTD = keys_KSD[:, None, end - T : end].expand_as(q_KGTD)
    v_KGTD = values_KSD[:, None, end - T : end].expand_as(q_KGTD)
    bias_TT = None
    if rule_TT is not None:
        bias_TT = torch.zeros(T, T, dtype=q_KRD.dtype).masked_fill_(~rule_TT, -math.inf)
    block, block_lse = _flash(q_KGTD, k_KGTD, v_KGTD, is_causal=rule_TT is None, attn_mask=bias_TT)
    if end == T:
        return block
    # No rule holds in the prefix, so the kernel repacks its K and V once per KV head.
    k_KSD, v_KSD = keys_KSD[:, : end - T], values_KSD[:, : end - T]
    prefix_KRD, lse_KR = (out[0] for out in _flash(q_KRD[None], k_KSD[None], v_KSD[None]))
    return merge_by_lse(prefix_KRD.view_as(block), lse_KR.view_as(block_lse), block, block_lse)
