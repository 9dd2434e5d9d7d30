"""Attention on a CPU by PyTorch's own operations, where there are no compiled kernels.

- A short block is folded: the G query heads of a KV head and its T tokens are the rows of one
  matrix, so K and V are read once per KV head, as they lie. One call of PyTorch's flash kernel
  takes prefix and block, cut in windows so that all cores have work.
- A long block, of a prefill, runs the flash kernel over the prefix and over the block, merged by
  log-sum-exp.

Legend: B batch, S slots, K KV heads (of all rows), H query heads, G = H / K, D head dim, T new
tokens, R = G T, P = PIECES.
"""

import functools
import math

import torch
from torch import Tensor

from minitri.model.attention import block_rule, fold, row_by_row

SHORT_BLOCK = 24
"""Longest block, in tokens, that is folded: those of decoding with ordinary gammas."""

SPLIT_PREFIX = 1536
"""With more slots than that, flash runs over PIECES windows: else too few rows for all cores."""

PIECES = 4
"""Parts of a long prefix that are read side by side. Fixed: results do not depend on the cores."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend_cpu(
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    prefix_lengths: list[int],
    rule_TT: Tensor | None = None,
    lengths_B: Tensor | None = None,  # noqa: ARG001 (the contract's)
) -> Tensor:
    """Attention of a block on a CPU; the contract is `model.attention.Attend`.

    Rows of equal length are computed as one row with B times as many KV heads.
    """
    if min(prefix_lengths) < max(prefix_lengths):
        return row_by_row(attend_cpu, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)
    B, T, H, D = q_BTHD.shape
    K = keys_BKSD.shape[1]
    end = prefix_lengths[0] + T
    kernel = flash_prefill if T > SHORT_BLOCK else flash_windows
    q_KRD = fold(q_BTHD, K).flatten(0, 1)
    out_KGTD = kernel(q_KRD, keys_BKSD.flatten(0, 1), values_BKSD.flatten(0, 1), end, T, rule_TT)
    return out_KGTD.view(B, K, H // K, T, D).permute(0, 3, 1, 2, 4).flatten(2, 3)


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
    T: int,
    G: int,
    pieces: int,
    width: int,
    apart: int,
    dtype: torch.dtype,
    rule_TT: Tensor | None = None,
) -> Tensor | None:
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


def merge_by_lse(left: Tensor, left_lse: Tensor, right: Tensor, right_lse: Tensor) -> Tensor:
    """Attention over the union of two disjoint sets of keys, from the outputs (..., T, D) over each
    and the log-sum-exps (..., T) of their scores."""
    share = torch.sigmoid(right_lse - left_lse).unsqueeze(-1).to(left.dtype)
    return torch.lerp(left, right, share)
