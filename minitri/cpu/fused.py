"""The network on compiled kernels: what `use_kernels` puts in the place of a model's layers.

A short pass runs six kernels a layer, each of which reads its weights, K and V once: RMSNorm with
the projection behind it, RoPE, attention, projections with the residual addition behind them, and
gate, up and SiLU together. Weights stay plain, as they were loaded. Blocks of more than
LONGEST_BLOCK tokens, of a prefill, take the plain layers, but for attention and RoPE.

Legend: B batch, T tokens, E hidden size, H query heads, D head dim, X any number of features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitri.cpu.kernels import Kernels
from minitri.model.linear import Linear, TiedHead
from minitri.model.llama import Attention, Layer, Llama, Pass, RMSNorm
from minitri.model.rope import Rotary
from minitri.settings import LONGEST_BLOCK


class KernelLinear(Linear):
    """y = x W^T + b, by a kernel for short blocks."""

    bits = 16

    def __init__(self, plain: Linear, kernels: Kernels, *, is_head: bool) -> None:
        """Shares the weight of a plain layer. Logits of a head are float32, without rounding."""
        take_over(self, plain)
        self.kernels, self.is_head = kernels, is_head
        self.in_features = plain.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        if is_short(x):
            return fused(self, x, is_wide=self.is_head)
        return F.linear(x, self.plain_weight(x.dtype), self.bias)

    def plain_weight(self, dtype: torch.dtype) -> Tensor:  # noqa: ARG002 (for other kinds)
        """W of shape (out_features, in_features)."""
        return self.weight


class KernelTiedHead(KernelLinear, TiedHead):
    """An LM head that is the embedding table, too."""


class KernelAttention(Attention):
    """Attention between linear layers that are kernels."""

    def __init__(self, plain: Attention, kernels: Kernels) -> None:
        take_over(self, plain)
        self.kernels = kernels

    def rotate(self, heads_BTHD: Tensor, rotary: Rotary) -> Tensor:
        return self.kernels.rotate(heads_BTHD, rotary.cos, rotary.signed_sin)


class KernelLayer(Layer):
    """A transformer block in six kernels."""

    def __init__(self, plain: Layer) -> None:
        """Shares the modules of a plain layer, whose linear layers are `KernelLinear` already."""
        take_over(self, plain)

    def forward(self, x_BTE: Tensor, layer: int, shared: Pass) -> Tensor:
        if not is_short(x_BTE):
            return super().forward(x_BTE, layer, shared)
        attention, mlp = self.self_attn, self.mlp
        qkv_BTX = fused(attention.qkv_proj, x_BTE, norm=self.input_layernorm)
        out_BTX = attention.mix(qkv_BTX, layer, shared)
        x_BTE = fused(attention.o_proj, out_BTX, residual=x_BTE)
        norm = self.post_attention_layernorm
        inner_BTX = fused(mlp.gate_up_proj, x_BTE, norm=norm, is_gated=True)
        return fused(mlp.down_proj, inner_BTX, residual=x_BTE)


def fused(layer: nn.Module, x: Tensor, *, norm: RMSNorm | None = None, **options: Any) -> Tensor:
    """A `KernelLinear` with what stands before and behind it; see `Kernels.linear`."""
    assert isinstance(layer, KernelLinear)
    if norm is not None:
        options |= {"norm": norm.weight, "eps": norm.eps}
    return layer.kernels.linear(
        x, layer.weight, layer.out_features, bits=layer.bits, bias=layer.bias, **options
    )


def is_short(x: Tensor) -> bool:
    """Whether (..., T, X) is a block of decoding; longer ones are matrix multiplications."""
    return x.dim() < 2 or x.shape[-2] <= LONGEST_BLOCK


def use_kernels(model: Llama, kernels: Kernels) -> None:
    """Puts kernels in the place of a model's linear layers, attention and blocks."""
    for parent in reversed(list(model.modules())):  # a copy of a module holds what it has by then
        for name, child in list(parent.named_children()):
            new: nn.Module = child
            if isinstance(child, Linear):
                kind = KernelTiedHead if isinstance(child, TiedHead) else KernelLinear
                new = kind(child, kernels, is_head=child is model.lm_head)
            elif isinstance(child, Attention):
                new = KernelAttention(child, kernels)
            elif isinstance(child, Layer):
                new = KernelLayer(child)
            setattr(parent, name, new)
    model.attend = kernels.attend
    model.is_row_invariant = True
    model.decoding = kernels.alone


def take_over(new: nn.Module, other: nn.Module) -> nn.Module:
    """Makes `new` hold what another module holds, and returns it."""
    nn.Module.__init__(new)
    state = ((name, dict(v) if isinstance(v, dict) else v) for name, v in vars(other).items())
    new.__dict__.update(state)
    return new
