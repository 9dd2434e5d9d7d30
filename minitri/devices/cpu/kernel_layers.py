"""Modules of a Llama on compiled CPU kernels, and `use_kernels`, which puts them into a model.

A short pass is one call for all layers. A block of a prompt, or of more than LONGEST_BLOCK tokens,
goes through the plain layers with compiled attention and RoPE. Weights may have 4 to 8 bits.

Legend: L layers, B batch, T tokens, S slots, E inputs, N outputs, R rows, X bytes of a packed row,
H query heads, K KV heads, D head dim.
"""

import ctypes
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from minitri.core.log import log
from minitri.core.model.cache import Cache
from minitri.core.model.execution import Execution
from minitri.core.model.linear import Linear, Table, TiedHead, TrimmedHead
from minitri.core.model.llama import Attention, Layer, Layers, Llama, Pass, gate
from minitri.core.model.rope import Rotary
from minitri.core.settings import LONGEST_BLOCK
from minitri.devices.cpu.abi import LayerWeights, Matrix, PassArguments
from minitri.devices.cpu.kernels import KernelNorm, Kernels, memory_of, require
from minitri.devices.cpu.products import multiply_rows
from minitri.devices.cpu.quantized import GROUP, PANEL, Form, packed_shape, quantize
from minitri.devices.cpu.tiles import Tiles
from minitri.devices.replace import Factories, copy_with, replace_modules

Stored = Mapping[tuple[str, tuple[int, ...]], Form]  # a file's matrices, by name and shape


class KernelLinear(Linear):
    """Linear layer y = x W^T + b; its `forward` is for long blocks, short passes read W and b."""

    def __init__(
        self,
        like: Linear,
        kernels: Kernels,
        packed_NX: Tensor | None = None,
        form: Form = Form.PLAIN,
    ) -> None:
        """Takes over bias and weights of `like`; `packed_NX`, if given, replaces the weights."""
        own = like.weight if packed_NX is None else nn.Parameter(packed_NX, requires_grad=False)
        super().__init__(own, like.bias)
        self.in_features = like.in_features
        self.out_features = like.out_features
        self.dtype = like.weight.dtype
        self.kernels = kernels
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels.has_products(x.dtype, self.form):
            return self.multiply(x, kernel="product")
        product_RN = multiply_rows(x.flatten(0, -2), self.plain_weight(x.dtype), self.bias)
        return product_RN.view(*x.shape[:-1], -1)

    def multiply(self, x: Tensor, **options: Any) -> Tensor:
        """The layer by a compiled kernel; `options` as for `Kernels.linear`."""
        matrix = (self.weight, self.form, self.out_features)
        return self.kernels.linear(x, *matrix, bias=self.bias, **options)

    def plain_weight(self, dtype: torch.dtype, rows_R: Tensor | None = None) -> Tensor:
        """W (out_features, in_features), dequantized to `dtype`, or its rows `rows_R` alone."""
        if self.form == Form.PLAIN:
            return self.weight if rows_R is None else self.weight[rows_R]
        matrix = (self.weight, self.in_features, self.form, dtype)
        last = self.out_features if rows_R is None else None
        return self.kernels.dequantize(*matrix, rows_R)[:last]


class KernelParts(nn.ModuleDict):
    """A fused projection, such as q, k, v, whose parts have weights in different forms."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.values()], -1)


class KernelHead(KernelLinear):
    """LM head that a compiled kernel computes for short blocks."""

    is_wide = True  # logits are float32

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() > 1 and x.shape[-2] > LONGEST_BLOCK:
            return super().forward(x)
        return self.multiply(x, is_wide=self.is_wide)


class KernelTable(KernelLinear, Table):
    """Embedding table, quantized or not, of which rows alone are read."""

    def rows(self, numbers: Tensor) -> Tensor:
        return self.plain_weight(self.dtype, numbers.flatten()).view(*numbers.shape, -1)


class KernelTiedHead(KernelTable, KernelHead, TiedHead):
    """LM head that shares its weights with the embedding table."""


class KernelPartialHead(KernelHead):
    """LM head over a part of the vocabulary; its logits are rounded to the model's dtype."""

    is_wide = False


@dataclass(frozen=True)
class KernelRotary(Rotary):
    """Rotary embedding of a block's queries and keys by a compiled kernel."""

    kernels: Kernels

    def rotate(self, x_BTHD: Tensor) -> Tensor:
        return self.kernels.rotate(x_BTHD, self.cos, self.signed_sin)


class KernelLayers(Layers):
    """All transformer blocks by one call of a kernel, which also writes and reads the cache."""

    def __init__(self, plain: Layers, kernels: Kernels) -> None:
        """Takes over the modules of `plain`, whose linear layers are `KernelLinear` already."""
        super().__init__(plain)
        self.kernels = kernels

    def forward(self, x_BTE: Tensor, shared: Pass) -> Tensor:
        cache = shared.cache
        rotary = shared.rotary
        if shared.is_prompt or x_BTE.shape[1] > LONGEST_BLOCK or cache.is_hosted:
            compiled = KernelRotary(rotary.cos, rotary.signed_sin, self.kernels)
            return super().forward(x_BTE, replace(shared, rotary=compiled))
        x_BTE = x_BTE.clone(memory_format=torch.contiguous_format)
        rule = None if shared.rule_TT is None else shared.rule_TT.contiguous()
        lengths_B = torch.tensor(cache.lengths)
        arguments = self.arguments(x_BTE, cache, lengths_B)
        L, _, _, _, D = cache.keys.shape
        B, T, _ = x_BTE.shape
        turns = (rotary.cos, rotary.signed_sin)
        queries = shared.queries_LBTHD
        require(
            *((turn.dtype, turn.numel()) == (torch.float32, B * T * D) for turn in turns),
            all(turn.is_contiguous() for turn in turns),
            rule is None or rule.shape == (T, T),
            queries is None or (queries.dtype == x_BTE.dtype and queries[0].is_contiguous()),
            queries is None or queries.shape == (L, B, queries.shape[2], arguments.H, D),
            tensors=(*turns, queries),
        )
        arguments.fill(cos=turns[0], sin=turns[1], rule=rule)
        if queries is not None:
            arguments.fill(queries=queries, W=queries.shape[2], queries_layer=queries.stride(0))
        self.kernels.call("pass", arguments, x_BTE.dtype)
        return x_BTE

    def arguments(self, x_BTE: Tensor, cache: Cache, lengths_B: Tensor) -> PassArguments:
        """The arguments of a pass that overwrites the hidden states `x_BTE` with its result."""
        keys = cache.keys
        B, T, E = x_BTE.shape
        L, num_rows, K, S, D = keys.shape
        kv_layer, kv_batch, kv_head, kv_slot, kv_number = keys.stride()
        if max(cache.lengths) + T > S:
            raise IndexError(f"a block of {T} after {max(cache.lengths)} of {S} tokens")
        first = self[0]
        assert isinstance(first, Layer)
        H, held_K, _ = first.self_attn.heads
        raw_keys = getattr(cache, "raw_keys", None)
        slots = [part for part in (keys, cache.values, raw_keys) if part is not None]
        like = (keys.shape, keys.stride(), x_BTE.dtype)
        require(
            *((part.shape, part.stride(), part.dtype) == like for part in slots),
            kv_number == 1 and self.kernels.can_read(slots),
            len(cache.lengths) == B <= num_rows and min(cache.lengths) >= 0,
            (len(self), held_K, first.mlp.gate_up_proj.in_features) == (L, K, E),
            x_BTE.is_contiguous(),
            tensors=(x_BTE, *map(memory_of, slots)),
        )
        arguments = PassArguments(x=x_BTE, keys=memory_of(keys), values=memory_of(cache.values))
        arguments.fill(L=L, B=B, T=T, E=E, H=H, K=K, D=D, num_threads=self.kernels.num_threads)
        arguments.fill(layers=ctypes.addressof(self._weights), eps=first.input_layernorm.eps)
        arguments.fill(raw_keys=raw_keys, lengths=lengths_B, scale=first.residual_scale)
        arguments.seconds = self.kernels.seconds
        arguments.fill(kv_layer=kv_layer, kv_batch=kv_batch, kv_head=kv_head, kv_slot=kv_slot)
        arguments.is_tiled = isinstance(keys, Tiles)
        return arguments

    @cached_property
    def _weights(self) -> ctypes.Array[LayerWeights]:
        """Addresses of the weights of all layers, kept, as weights do not move in memory."""
        return (LayerWeights * len(self))(*map(weights_of, self))


def weights_of(layer: nn.Module) -> LayerWeights:
    """Addresses of the weights of a transformer block."""
    assert isinstance(layer, Layer)
    attention = layer.self_attn
    qkv = attention.qkv_proj
    parts = qkv.values() if isinstance(qkv, KernelParts) else [qkv]
    weights = LayerWeights(
        qkv=(Matrix * 3)(*map(matrix_of, parts)),
        o=matrix_of(attention.o_proj),
        gate_up=matrix_of(layer.mlp.gate_up_proj),
        down=matrix_of(layer.mlp.down_proj),
        input_norm=layer.input_layernorm.weight,
        post_norm=layer.post_attention_layernorm.weight,
        is_unrotated=not attention.rotates,
    )
    if attention.q_norm and attention.k_norm:
        weights.fill(q_norm=attention.q_norm.weight, k_norm=attention.k_norm.weight)
    return weights


def matrix_of(linear: nn.Module) -> Matrix:
    """Addresses of weights and bias of a linear layer."""
    assert isinstance(linear, KernelLinear)
    matrix = Matrix(weights=linear.weight, bias=linear.bias, form=linear.form)
    matrix.fill(N=linear.out_features, E=linear.in_features)
    return matrix


def use_kernels(model: Llama, kernels: Kernels) -> None:
    """Replaces a model's linear layers, attention, norm and blocks by compiled kernels."""
    layers = replace_modules(model.layers, {Linear: partial(KernelLinear, kernels=kernels)})
    if model.dtype == torch.float32:  # SiLU on several threads depends on the number of rows
        for layer in layers:
            layer.mlp.gate = kernels.decoding()(gate)
    head = KernelPartialHead if isinstance(model.lm_head, TrimmedHead) else KernelHead
    heads: Factories = {
        Linear: partial(head, kernels=kernels),
        TiedHead: partial(KernelTiedHead, kernels=kernels),
    }
    model.layers = KernelLayers(layers, kernels)
    model.norm = KernelNorm(model.norm, kernels)
    model.lm_head = replace_modules(model.lm_head, heads)
    if hasattr(model, "embed_tokens"):
        model.embed_tokens = KernelTable(model.embed_tokens, kernels)
    model.attend = kernels.attend
    model.execution = Execution(
        is_row_invariant=True,
        decoding=kernels.decoding,
        reading=kernels.reading,
        probs=kernels.probs,
        is_narrow=not kernels.instructions.startswith("AVX-512"),
        make_slots=kernels.make_slots,
    )


def split_projections(model: Llama, stored: Stored, kernels: Kernels) -> None:
    """Splits qkv projections into empty q, k and v where a file stores these in different forms."""
    for path, attention in [*model.named_modules()]:
        if not isinstance(attention, Attention):
            continue
        E = attention.qkv_proj.in_features
        has_bias = attention.qkv_proj.bias is not None
        names = {
            f"{part}_proj": count * attention.head_dim
            for part, count in zip("qkv", attention.heads, strict=True)
        }
        keys = ((f"model.{path}.{name}.weight", (N, E)) for name, N in names.items())
        if len({stored.get(key) for key in keys}) > 1:
            parts = {
                name: KernelLinear(Linear.empty(E, N, dtype=model.dtype, bias=has_bias), kernels)
                for name, N in names.items()
            }
            model.set_submodule(f"{path}.qkv_proj", KernelParts(parts))


def keep_quantized(model: Llama, places: Mapping[str, Tensor], stored: Stored) -> dict[str, Tensor]:
    """Replaces linear layers by empty quantized ones where a file has their weights quantized;
    returns views of these to fill, by the file's names. `places` has the views of weights that
    tensors fill; the tensors of a fused projection must have one form, or be fused in the file."""
    homes = {name: place.untyped_storage().data_ptr() for name, place in places.items()}
    layers = {p: layer for p, layer in model.named_modules() if isinstance(layer, KernelLinear)}
    num_kept = 0
    kept: dict[str, Tensor] = {}
    for path, layer in layers.items():
        own = layer.weight.untyped_storage().data_ptr()
        names = [name for name, home in homes.items() if home == own]
        keys = [(f"model.{path}.weight", tuple(layer.weight.shape))]  # if fused in the file
        if keys[0] not in stored:
            keys = [(name, tuple(places[name].shape)) for name in names]
        form, *others = {stored.get(key) for key in keys}
        is_in_panels = len(names) == 1 or not any(len(places[name]) % PANEL for name in names)
        if others or not (form and is_in_panels):
            continue
        shape = packed_shape(layer.out_features, layer.in_features, form)
        packed_NX = torch.empty(shape, dtype=torch.uint8)
        model.set_submodule(path, type(layer)(layer, layer.kernels, packed_NX, form))
        num_kept += 1
        ends = itertools.accumulate(shape[0] for _, shape in keys[:-1])
        kept |= zip([name for name, _ in keys], packed_NX.tensor_split([*ends]), strict=True)
    model.num_bytes = sum(weight.nbytes for weight in model.parameters())
    log.debug("%d of %d matrices stay quantized", num_kept, len(layers))
    return kept


def quantized_copy(model: Llama) -> Llama:
    """A copy of a model on the CPU kernels with 4-bit linear layers, for guessing only.

    The LM head has 8 bits: with 4, SmolLM2 and its copy agree on 79 % of the tokens, not on 99 %.
    """

    def quantized(layer: KernelLinear) -> KernelLinear:
        form = Form.Q8 if isinstance(layer, KernelHead) else Form.Q4
        is_whole = form == Form.Q8 or layer.out_features % (2 * PANEL) == 0  # of gates, ups
        if not is_whole or layer.in_features % GROUP or layer.form.bits <= max(form.bits, 6):
            return layer
        packed_NX = quantize(layer.plain_weight(torch.float32), form.bits)
        return type(layer)(layer, layer.kernels, packed_NX, form)

    factories: Factories = {
        **dict.fromkeys((KernelLinear, KernelHead, KernelTiedHead, KernelPartialHead), quantized),
        KernelLayers: lambda layers: KernelLayers(layers, layers.kernels),
    }
    return copy_with(model, factories)
