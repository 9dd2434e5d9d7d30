"""The network on compiled kernels: what `use_kernels` puts in the place of a model's layers.

A short pass is one call for all layers. Each of them reads its weights, K and V once: RMSNorm with
the projection behind it, RoPE, attention, projections with the residual addition behind them, and
gate, up and SiLU together. Weights stay plain, as they were loaded. Blocks of a
prompt, or of more than LONGEST_BLOCK tokens, take the plain layers, but for attention and RoPE.

Legend: L layers, B batch, T tokens, S slots, E hidden size, H query heads, K KV heads, D head dim.
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitri.caches.full import FullCache
from minitri.caches.retrieval import RetrievalCache
from minitri.caches.streaming import StreamingCache
from minitri.cpu.kernels import Kernels, LayerWeights, Matrix, PassArguments, address
from minitri.model.linear import Linear, TiedHead
from minitri.model.llama import Attention, Layer, Layers, Llama, Pass
from minitri.model.rope import Rotary
from minitri.settings import LONGEST_BLOCK

WRITABLE = (FullCache, RetrievalCache, StreamingCache)
"""Caches that are nothing but tensors (L, B, K, S, D), which a pass may write and read itself."""


class KernelLinear(Linear):
    """y = x W^T + b, by a kernel for short blocks."""

    bits = 16

    def __init__(self, plain: Linear, kernels: Kernels, *, is_head: bool) -> None:
        """Shares the weight of a plain layer. Logits of a head are float32, without rounding."""
        take_over(self, plain)
        self.kernels, self.is_head = kernels, is_head
        self.in_features = plain.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        num_tokens = x.shape[-2] if x.dim() > 1 else 1
        if self.kernels.is_short(num_tokens):
            return self.kernels.linear(
                x,
                self.weight,
                self.out_features,
                bits=self.bits,
                bias=self.bias,
                is_wide=self.is_head,
            )
        # Fewer rows might be multiplied in another way, with other last bits.
        padded = F.pad(x, (0, 0, 0, max(0, LONGEST_BLOCK + 1 - num_tokens)))
        return F.linear(padded, self.plain_weight(x.dtype), self.bias)[..., :num_tokens, :]

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


class KernelLayers(Layers):
    """All transformer blocks in one call, which writes to the cache and reads it by itself."""

    _weights: "ctypes.Array[LayerWeights] | None" = None

    def __init__(self, plain: Layers, kernels: Kernels) -> None:
        """Shares the modules of plain layers, whose linear layers are `KernelLinear` already."""
        take_over(self, plain)
        self.kernels = kernels

    def forward(self, x_BTE: Tensor, shared: Pass) -> Tensor:
        cache, rule, queries = shared.cache, shared.rule_TT, shared.queries_LBTHD
        if not (self.kernels.is_short(x_BTE.shape[1]) and type(cache) in WRITABLE):
            return super().forward(x_BTE, shared)
        assert isinstance(cache, WRITABLE)
        if self._weights is None:
            self._weights = (LayerWeights * len(self))(*map(weights_of, self))
        B, T, E = x_BTE.shape
        L, _, K, S, D = cache.keys.shape
        if max(cache.lengths) + T > S:
            raise IndexError(f"a block of {T} behind {max(cache.lengths)} of {S} tokens")
        x_BTE = x_BTE.clone(memory_format=torch.contiguous_format)
        rule = None if rule is None else rule.contiguous()
        assert cache.keys.stride() == cache.values.stride()
        assert cache.keys.dtype == x_BTE.dtype
        assert queries is None or (queries.is_contiguous() and queries.dtype == x_BTE.dtype)
        raw_keys = cache.raw_keys if isinstance(cache, StreamingCache) else None
        rotary, lengths = shared.rotary, (ctypes.c_int64 * B)(*cache.lengths)
        first = self[0]
        assert isinstance(first, Layer)
        arguments = PassArguments(
            self._weights, address(x_BTE), address(rotary.cos), address(rotary.signed_sin),
            address(cache.keys), address(cache.values), address(raw_keys),
            address(queries), ctypes.addressof(lengths), address(rule),
            L, B, T, 0 if queries is None else queries.shape[2], E, first.self_attn.heads[0], K, D,
            *cache.keys.stride()[:4], first.input_layernorm.eps,
        )  # fmt: skip
        self.kernels.run_pass(x_BTE.dtype, arguments)
        return x_BTE


def weights_of(layer: nn.Module) -> LayerWeights:
    """The addresses of a block's weights, which stay where they are."""
    assert isinstance(layer, Layer)
    attention, mlp = layer.self_attn, layer.mlp
    norms = (
        layer.input_layernorm, layer.post_attention_layernorm, attention.q_norm, attention.k_norm,
    )  # fmt: skip
    linears = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    weights = (None if norm is None else address(norm.weight) for norm in norms)
    return LayerWeights(*weights, *map(matrix_of, linears))


def matrix_of(layer: nn.Module) -> Matrix:
    """The same of a linear layer."""
    assert isinstance(layer, KernelLinear)
    weights, bias = address(layer.weight), address(layer.bias)
    return Matrix(weights, bias, layer.out_features, layer.in_features, layer.bits)


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
            elif isinstance(child, Layers):
                new = KernelLayers(child, kernels)
            setattr(parent, name, new)
    model.attend = kernels.attend
    model.is_row_invariant = True
    model.decoding, model.reading_prompt = kernels.alone, kernels.reading_prompt


def take_over(new: nn.Module, other: nn.Module) -> nn.Module:
    """Makes `new` hold what another module holds, and returns it."""
    nn.Module.__init__(new)
    state = ((name, dict(v) if isinstance(v, dict) else v) for name, v in vars(other).items())
    new.__dict__.update(state)
    new.__dict__.pop("_weights", None)  # the addresses of the other's
    return new
