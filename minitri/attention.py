"""Attention by prefix + block: every query sees the whole cached prefix; a T x T rule holds inside the block.

A forward pass brings T new tokens per row, whose keys and values already stand in the cache right behind the row's
prefix. So prefill, decoding, verification and trees are one call with different T and rules. The rule is causal
(`None`) or a (T, T) boolean tensor, True where a query (row) may see a block key (column).

How it is computed depends on the device, on T and on the length of the prefix:

- `attend_math` is the oracle of the tests: plain formulas in float32, or float64 for float64 tensors;
- on CPU a short block behind a long prefix materialises its scores by one matmul per KV head, with its G query heads
  and the T tokens folded into the rows of one matrix, so that K is read once per KV head; the rule touches only the
  last T columns. Values are summed by another matmul or, for few rows, as weighted bags, which read them in place;
- on CPU any other block runs PyTorch's flash kernel over the prefix and over the block, merged by log-sum-exp;
- on CUDA one fused kernel takes prefix and block with bottom-right causal alignment.

Legend: B batch, S slots, K KV heads, H query heads, G = H / K, D head dim, T new tokens.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

SHORT_BLOCK = 16
"""Longest block, in tokens, for which materialised scores beat the flash kernel on CPU, behind a long prefix."""

SHORT_PREFIX = 1280
"""Up to this many slots (prefix + block) flash is the faster one for short blocks, too: it costs fewer calls."""

STRIDE = 64
"""Short blocks meet the prefix in multiples of this many slots. oneDNN keeps compiled code for every matmul shape and
stride it has seen, 0.7 MB each, so shapes that grew with every token would take more memory than the cache itself."""

FEW_ROWS = 4
"""Up to this many rows (G T) of materialised scores, values are summed as bags: read in place, but once per row."""

MANY_SLOTS = 16384
"""From this many slots on, CPU sums over values are matmuls cut into `SPLITS` pieces that run side by side."""

SPLITS = 8
"""A fixed number that divides STRIDE, so that results do not depend on the number of cores."""

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend(
    q_BTHD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, prefix_lengths: list[int], rule_TT: Tensor | None = None
) -> Tensor:
    """Softmax attention of a block, (B, T, H, D), in the dtype of the queries.

    `keys_BKSD` and `values_BKSD` are the cache of one layer; row b is valid in its first `prefix_lengths[b] + T`
    slots, the last T of which are the block. What stands behind them changes nothing. The scale is 1 / sqrt(D).
    """
    one_row = _fused_row if q_BTHD.device.type == "cuda" else _cpu_row
    return _by_row(one_row, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)


def attend_math(
    q_BTHD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, prefix_lengths: list[int], rule_TT: Tensor | None = None
) -> Tensor:
    """The oracle: the same contract as `attend`, by the textbook."""
    return _by_row(_math_row, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)


def _by_row(one_row, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT) -> Tensor:  # type: ignore[no-untyped-def]
    """Rows have their own keys and lengths, so nothing is shared between them and a loop costs nothing."""
    B, T, H, D = q_BTHD.shape
    K = keys_BKSD.shape[1]
    rows = []
    for b, prefix in enumerate(prefix_lengths):
        q_KGTD = q_BTHD[b].view(T, K, H // K, D).permute(1, 2, 0, 3)
        out_KGTD = one_row(q_KGTD, keys_BKSD[b], values_BKSD[b], prefix + T, rule_TT)
        rows.append(out_KGTD.permute(2, 0, 1, 3).reshape(T, H, D))
    return torch.stack(rows) if B > 1 else rows[0].unsqueeze(0)


def block_rule(T: int, rule_TT: Tensor | None, device: torch.device) -> Tensor:
    """The rule as a boolean tensor (T, T): causal where none is given."""
    if rule_TT is not None:
        return rule_TT
    return torch.ones(T, T, dtype=torch.bool, device=device).tril_()


def _math_row(q_KGTD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, rule_TT: Tensor | None) -> Tensor:
    T, D = q_KGTD.shape[2:]
    keys_KSD, values_KSD = keys_KSD[:, :end], values_KSD[:, :end]
    exact = torch.promote_types(q_KGTD.dtype, torch.float32)
    q, k, v = q_KGTD.to(exact), keys_KSD[:, None].to(exact), values_KSD[:, None].to(exact)
    scores_KGTS = q @ k.transpose(-1, -2) / math.sqrt(D)
    scores_KGTS[..., -T:].masked_fill_(~block_rule(T, rule_TT, q.device), -math.inf)
    return (scores_KGTS.softmax(-1) @ v).to(q_KGTD.dtype)


def _cpu_row(q_KGTD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, rule_TT: Tensor | None) -> Tensor:
    fast = _matmul_row if q_KGTD.shape[2] <= SHORT_BLOCK and end > SHORT_PREFIX else _flash_row
    return fast(q_KGTD, keys_KSD, values_KSD, end, rule_TT)


def _matmul_row(q_KGTD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, rule_TT: Tensor | None) -> Tensor:
    """Per KV head, because a batched matmul over heads would first copy the prefix: its heads lie `capacity` apart.

    Scores and probabilities are stored in the dtype of the queries, so bfloat16 rounds them, which flash does not.
    Keys behind `end` may be read, but their scores are overwritten; values behind it do not enter.
    """
    K, G, T, D = q_KGTD.shape
    width = min(-(-end // STRIDE) * STRIDE, keys_KSD.shape[1])
    q_KRD = (q_KGTD * (1 / math.sqrt(D))).reshape(K, G * T, D)
    scores_KRS = q_KRD.new_empty(K, G * T, width)
    for q_RD, keys_SD, scores_RS in zip(q_KRD.unbind(), keys_KSD.unbind(), scores_KRS.unbind(), strict=True):
        torch.mm(q_RD, keys_SD[:width].t(), out=scores_RS)
    scores_KRS[..., end:] = -math.inf
    if T > 1:
        last = scores_KRS.view(K, G, T, width)[..., end - T : end]
        last.masked_fill_(~block_rule(T, rule_TT, q_KGTD.device), -math.inf)
    probs_KRS = torch.softmax(scores_KRS, -1, out=scores_KRS)
    if G * T <= FEW_ROWS and width < MANY_SLOTS:
        out_KRD = _bag_values(probs_KRS, values_KSD, end)
    else:
        out_KRD = torch.empty_like(q_KRD)
        for probs_RS, values_SD, out_RD in zip(probs_KRS.unbind(), values_KSD.unbind(), out_KRD.unbind(), strict=True):
            _mix_values(probs_RS[:, :end], values_SD[:end], out=out_RD)
    return out_KRD.view(K, G, T, D)


def _bag_values(probs_KRS: Tensor, values_KSD: Tensor, end: int) -> Tensor:
    """probs @ values, (K, R, D), as weighted bags of slots: one call, in which nothing is repacked."""
    K, R, width = probs_KRS.shape
    slots, starts = _bags(K, R, width, end, values_KSD.shape[1])
    bags = F.embedding_bag(slots, values_KSD.flatten(0, 1), starts, mode="sum", per_sample_weights=probs_KRS.view(-1))
    return bags[::2].view(K, R, -1)


@functools.lru_cache(maxsize=4)
def _bags(K: int, R: int, width: int, end: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Slots of every bag, in a table of all heads' slots, and where bags start; the same for all layers of a pass.

    Bags adjoin, so behind the bag of each row follows one of the slots from `end` to `width`, which is to be dropped.
    """
    heads = torch.arange(0, K * capacity, capacity, dtype=torch.int32)
    slots = heads[:, None, None] + torch.arange(width, dtype=torch.int32)  # (K, 1, width)
    starts = torch.arange(0, K * R * width, width, dtype=torch.int32)
    return slots.expand(K, R, width).flatten(), torch.stack((starts, starts + end), -1).flatten()


def _mix_values(probs_RS: Tensor, values_SD: Tensor, *, out: Tensor) -> None:
    """probs @ values, (R, D): a multiple of STRIDE slots, in pieces if they are many, then the rest."""
    S, D = values_SD.shape
    cut = S // STRIDE * STRIDE
    if cut == 0:
        torch.mm(probs_RS, values_SD, out=out)
        return
    if cut < MANY_SLOTS:
        torch.mm(probs_RS[:, :cut], values_SD[:cut], out=out)
    else:
        pieces = probs_RS[:, :cut].unflatten(1, (SPLITS, -1)).transpose(0, 1)  # (SPLITS, R, cut / SPLITS)
        torch.sum(torch.bmm(pieces, values_SD[:cut].view(SPLITS, -1, D)), 0, out=out)
    if cut < S:
        out.addmm_(probs_RS[:, cut:].contiguous(), values_SD[cut:])  # a stride, too, makes a new shape to oneDNN


def _flash_row(q_KGTD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, rule_TT: Tensor | None) -> Tensor:
    K, G, T, D = q_KGTD.shape
    keys_KSD, values_KSD = keys_KSD[:, :end], values_KSD[:, :end]
    # In the block a query head needs its own T x T rule; a KV head serves its G query heads without being copied.
    k = keys_KSD[:, None, -T:].expand(K, G, T, D)
    v = values_KSD[:, None, -T:].expand(K, G, T, D)
    if rule_TT is None:
        block, block_lse = _flash_cpu(q_KGTD, k, v, is_causal=True)
    else:
        bias = torch.zeros(T, T, dtype=q_KGTD.dtype).masked_fill_(~rule_TT, -math.inf)
        block, block_lse = _flash_cpu(q_KGTD, k, v, attn_mask=bias)
    if keys_KSD.shape[1] == T:
        return block
    # The prefix has no rule, so the group folds into rows, and the kernel repacks K and V once per KV head.
    folded = q_KGTD.reshape(1, K, G * T, D)
    prefix, prefix_lse = _flash_cpu(folded, keys_KSD[None, :, :-T], values_KSD[None, :, :-T])
    return merge_by_lse(prefix.view(K, G, T, D), prefix_lse.view(K, G, T), block, block_lse)


def merge_by_lse(left: Tensor, left_lse: Tensor, right: Tensor, right_lse: Tensor) -> Tensor:
    """Attention over the union of two disjoint key sets, from the outputs (..., T, D) and log-sum-exps (..., T)."""
    share = torch.sigmoid(right_lse - left_lse).unsqueeze(-1).to(left.dtype)
    return torch.lerp(left, right, share)


def _fused_row(q_KGTD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, end: int, rule_TT: Tensor | None) -> Tensor:
    K, G, T, D = q_KGTD.shape
    q = q_KGTD.reshape(1, K * G, T, D)
    k, v, S = keys_KSD[None, :, :end], values_KSD[None, :, :end], end
    mask = None
    if rule_TT is not None:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device)
        mask[:, S - T :] = rule_TT
    elif T > 1:
        mask = causal_lower_right(T, S)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=G > 1)
    return out.view(K, G, T, D)
