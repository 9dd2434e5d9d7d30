"""Attention on a CPU by PyTorch's flash kernel, where there are no compiled kernels.

Prefix and block are attended to apart and merged by log-sum-exp; the query heads of a KV head and
the tokens are rows of one matrix, so that K and V of the prefix are read once per KV head.

Legend: B batch, S slots, K KV heads, H query heads, G = H / K, D head dim, T new tokens, R = G T.
"""

import math

import torch
from torch import Tensor

from minitri.core.model.attention import row_by_row

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend_cpu(
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    prefix_lengths: list[int],
    rule_TT: Tensor | None = None,
    lengths_B: Tensor | None = None,  # noqa: ARG001 (the contract's)
) -> Tensor:
    """Attention of new tokens to cached ones and each other by PyTorch's flash kernel on a CPU."""
    prefix = min(prefix_lengths)
    if prefix < max(prefix_lengths):
        return row_by_row(attend_cpu, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)
    T, H = q_BTHD.shape[1:3]
    K = keys_BKSD.shape[1]
    slots = (keys_BKSD, values_BKSD)
    bias_TT = None
    if rule_TT is not None:
        bias_TT = torch.zeros(T, T, dtype=q_BTHD.dtype).masked_fill_(~rule_TT, -math.inf)
    block = (part[:, :, prefix : prefix + T].repeat_interleave(H // K, 1) for part in slots)
    out_BHTD, lse_BHT = _flash(
        q_BTHD.transpose(1, 2), *block, is_causal=bias_TT is None, attn_mask=bias_TT
    )
    if prefix == 0:
        return out_BHTD.transpose(1, 2)
    seen = (part[:, :, :prefix] for part in slots)
    out_BKRD, lse_BKR = _flash(fold(q_BTHD, K), *seen)
    share_BKR = torch.sigmoid(lse_BHT.reshape(lse_BKR.shape) - lse_BKR).to(out_BKRD.dtype)
    block_BKRD = out_BHTD.reshape(out_BKRD.shape)
    return unfold(torch.lerp(out_BKRD, block_BKRD, share_BKR.unsqueeze(-1)), T)


def fold(q_BTHD: Tensor, num_kv_heads: int) -> Tensor:
    """Queries (B, K, R, D) with the heads of a group and tokens as rows: K and V are read once."""
    B, T, H, D = q_BTHD.shape
    q_BTKGD = q_BTHD.view(B, T, num_kv_heads, H // num_kv_heads, D)
    return q_BTKGD.permute(0, 2, 3, 1, 4).flatten(2, 3)


def unfold(out_BKRD: Tensor, T: int) -> Tensor:
    """The inverse of `fold`: (B, T, H, D)."""
    B, K, R, D = out_BKRD.shape
    return out_BKRD.view(B, K, R // T, T, D).permute(0, 3, 1, 2, 4).flatten(2, 3)
