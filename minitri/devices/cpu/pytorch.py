"""Layers by PyTorch's own kernels on a CPU: attention, linear layers, and products of many rows.

Without compiled kernels, flash attention computes prefix and block apart, merged by log-sum-exp,
with the query heads of a KV head and all tokens as rows of one matrix; and oneDNN reads weights in
its own layout, up to twice as fast. With compiled kernels, PyTorch may still multiply many rows.
Legend: B batch, S slots, K KV heads, H query heads, G = H / K, D head dim, T new tokens, R rows,
E in_features, N out_features.
"""

import math
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitri.core.model.attention import row_by_row
from minitri.core.model.linear import Linear, TiedHead
from minitri.core.settings import LONGEST_BLOCK
from minitri.devices.replace import Factories

TILE = 256  # rows of each product where the number of rows would change last bits


def attend_cpu(
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    prefix_lengths: list[int],
    mask_TT: Tensor | None = None,
    lengths_B: Tensor | None = None,  # noqa: ARG001 (part of the contract)
) -> Tensor:
    """Attention (B, T, H, D) by PyTorch's flash CPU kernel; ignores `lengths_B`. Row b sees its
    first `prefix_lengths[b]` slots and, of the T after them, those in `mask_TT` (None: causal)."""
    prefix = min(prefix_lengths)
    if prefix < max(prefix_lengths):
        return row_by_row(attend_cpu, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, mask_TT)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    T, H = q_BTHD.shape[1:3]
    K = keys_BKSD.shape[1]
    q_BHTD = q_BTHD.transpose(1, 2)
    slots = (keys_BKSD, values_BKSD)
    bias_TT = None
    if mask_TT is not None:
        bias_TT = q_BTHD.new_zeros(T, T).masked_fill_(~mask_TT, -math.inf)
    block = (part[:, :, prefix : prefix + T].repeat_interleave(H // K, 1) for part in slots)
    out_BHTD, lse_BHT = flash(q_BHTD, *block, is_causal=bias_TT is None, attn_mask=bias_TT)
    if prefix == 0:
        return out_BHTD.transpose(1, 2)
    seen = (part[:, :, :prefix] for part in slots)
    out_BKRD, lse_BKR = flash(q_BHTD.unflatten(1, (K, -1)).flatten(2, 3), *seen)
    share_BKR = torch.sigmoid(lse_BHT.reshape(lse_BKR.shape) - lse_BKR).to(out_BKRD.dtype)
    merged_BKRD = torch.lerp(out_BKRD, out_BHTD.reshape(out_BKRD.shape), share_BKR.unsqueeze(-1))
    return merged_BKRD.unflatten(2, (-1, T)).flatten(1, 2).transpose(1, 2)


class PackedLinear(Linear):
    """Linear layer with W in oneDNN's layout, which cannot be converted back."""

    def __init__(self, plain: Linear) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach()), plain.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")


class PackedTiedHead(TiedHead):
    """LM head tied to the embedding table, multiplying with a copy of that in oneDNN's layout."""

    def __init__(self, plain: TiedHead) -> None:
        super().__init__(plain.weight)
        self.packed = PackedLinear(plain)

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch has oneDNN's kernel for packed weights of this dtype on this device."""
    kernels = torch.ops.mkldnn
    if device.type != "cpu" or not hasattr(kernels, "_reorder_linear_weight"):
        return False
    if dtype == torch.float16:
        return kernels._is_mkldnn_fp16_supported()
    return dtype == torch.float32 or kernels._is_mkldnn_bf16_supported()


def pack_linears(model: nn.Module) -> None:
    """Puts a model's plain linear layers into oneDNN's layout, one by one: memory may be short."""
    packed: Factories = {Linear: PackedLinear, TiedHead: PackedTiedHead}
    for name, layer in list(model.named_modules()):
        if pack := packed.get(type(layer)):
            model.set_submodule(name, pack(layer))
            del layer.weight


def multiply_rows(rows_RE: Tensor, weight_NE: Tensor, bias_N: Tensor | None) -> Tensor:
    """Linear layer x W^T + b, (R, N), by PyTorch, such that a row's bits do not depend on others.
    Used on processors that multiply bfloat16, where it is the fastest way."""
    R = len(rows_RE)
    tile = product_tile(weight_NE.dtype, *weight_NE.shape, torch.get_num_threads())
    tile = tile or max(R, LONGEST_BLOCK + 1)
    if R % tile:
        rows_RE = F.pad(rows_RE, (0, 0, 0, -R % tile))
    multiply = torch.mm if bias_N is None else partial(torch.addmm, bias_N)
    out_RN = rows_RE.new_empty(len(rows_RE), len(weight_NE))
    for part, out in zip(rows_RE.split(tile), out_RN.split(tile), strict=True):
        multiply(part, weight_NE.t(), out=out)
    return out_RN[:R]


@lru_cache
def product_tile(dtype: torch.dtype, N: int, E: int, num_threads: int) -> int | None:  # noqa: ARG001 (a key)
    """How many rows PyTorch must multiply with a (N, E) matrix at once, so that a row's bits do not
    depend on the others; None: any number above LONGEST_BLOCK. With AMX oneDNN may sum few rows in
    another order; a test with random numbers finds whether it does, for each `num_threads`."""
    seeded = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, E, generator=seeded, dtype=dtype) for n in (4 * TILE, N))
    many = F.linear(x, weight)
    few = (LONGEST_BLOCK + 1, TILE, 2 * TILE)
    is_same = all(torch.equal(F.linear(x[:rows], weight), many[:rows]) for rows in few)
    return None if is_same else TILE
