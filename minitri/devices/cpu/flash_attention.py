"""Attention on a CPU by PyTorch's flash kernel, where there are no compiled kernels.

Attention to the prefix and to the block is computed apart and merged by log-sum-exp. The query
heads of a KV head and the tokens are rows of one matrix: K and V of the prefix are read once.

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
    mask_TT: Tensor | None = None,
    lengths_B: Tensor | None = None,  # noqa: ARG001 (the contract's)
) -> Tensor:
    """Attention of new tokens to cached ones and each other by PyTorch's flash kernel on a CPU."""
    prefix = min(prefix_lengths)
    if prefix < max(prefix_lengths):
        return row_by_row(attend_cpu, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, mask_TT)
    T, H = q_BTHD.shape[1:3]
    K = keys_BKSD.shape[1]
    q_BHTD = q_BTHD.transpose(1, 2)
    slots = (keys_BKSD, values_BKSD)
    bias_TT = None
    if mask_TT is not None:
        bias_TT = q_BTHD.new_zeros(T, T).masked_fill_(~mask_TT, -math.inf)
    block = (part[:, :, prefix : prefix + T].repeat_interleave(H // K, 1) for part in slots)
    out_BHTD, lse_BHT = _flash(q_BHTD, *block, is_causal=bias_TT is None, attn_mask=bias_TT)
    if prefix == 0:
        return out_BHTD.transpose(1, 2)
    seen = (part[:, :, :prefix] for part in slots)
    out_BKRD, lse_BKR = _flash(q_BHTD.unflatten(1, (K, -1)).flatten(2, 3), *seen)
    share_BKR = torch.sigmoid(lse_BHT.reshape(lse_BKR.shape) - lse_BKR).to(out_BKRD.dtype)
    merged_BKRD = torch.lerp(out_BKRD, out_BHTD.reshape(out_BKRD.shape), share_BKR.unsqueeze(-1))
    return merged_BKRD.unflatten(2, (-1, T)).flatten(1, 2).transpose(1, 2)
