"""Modules of a Llama on compiled CPU kernels, and quantized weights for them.

A short pass is one kernel call, and most are part of one of `rounds.py`. A block of a prompt, or a
long one, takes a call for each layer; with plain weights, or K and V in host memory, it goes
through the modules of each layer instead.
Legend: L layers, B batch, T tokens, S slots, E inputs, N outputs, R rows, X bytes of a packed row,
H query heads, K KV heads, D head dim.
"""

import ctypes
import itertools
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from minitri.core.caches.streaming import StreamingCache
from minitri.core.log import log
from minitri.core.model.cache import Cache
from minitri.core.model.linear import Linear, Table, TiedHead
from minitri.core.model.llama import Layer, Layers, Llama, Pass
from minitri.core.settings import LONGEST_BLOCK
from minitri.devices.cpu.abi import LayerWeights, LinearArguments, Matrix, PassArguments
from minitri.devices.cpu.kernels import Kernels, is_matrix, require
from minitri.devices.cpu.pytorch import multiply_rows
from minitri.devices.cpu.quantized import GROUP, PANEL, Form, packed_shape, quantize
from minitri.devices.replace import Factories, copy_with

Stored = Mapping[tuple[str, tuple[int, ...]], Form]  # formats of matrices, by name and shape


class KernelLinear(Linear):
    """Linear layer y = x W^T + b on the compiled CPU kernels, with plain or quantized W."""

    def __init__(
        self,
        like: Linear,
        kernels: Kernels,
        packed_NX: Tensor | None = None,
        form: Form = Form.PLAIN,
    ) -> None:
        """With the bias of `like`, and its weights, or quantized ones: `packed_NX` in `form`."""
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

    def multiply(self, x: Tensor, kernel: str = "linear", *, is_wide: bool = False) -> Tensor:
        """Computes y (..., N) of x (..., E) by a compiled kernel; y is float32 if `is_wide`.
        Kernel "linear" is for few rows, "product" for many; with plain weights, "product" sums over
        E in order, in float32. By either, a row's bits do not depend on the other rows."""
        x = x.contiguous()
        E = x.shape[-1]
        N = self.out_features
        bias = self.bias
        require(
            is_matrix(self.weight, N, E, self.form, x.dtype),
            bias is None or (bias.dtype, *bias.shape, *bias.stride()) == (x.dtype, N, 1),
            tensors=(x, self.weight, bias),
        )
        out = x.new_empty(*x.shape[:-1], N, dtype=torch.float32 if is_wide else x.dtype)
        arguments = LinearArguments(x=x, weights=self.weight, bias=bias, out=out, is_wide=is_wide)
        arguments.fill(R=x.numel() // E, E=E, N=N, stride=N)
        self.kernels.call(kernel, arguments, x.dtype, self.form)
        return out

    def plain_weight(self, dtype: torch.dtype, rows_R: Tensor | None = None) -> Tensor:
        """W (out_features, in_features), or only its rows `rows_R`; in `dtype` if quantized."""
        if self.form == Form.PLAIN:
            return self.weight if rows_R is None else self.weight[rows_R]
        matrix = (self.weight, self.out_features, self.in_features, self.form)
        return self.kernels.dequantize(*matrix, dtype, rows_R)


class KernelParts(nn.ModuleDict):
    """A fused projection, such as q, k, v, whose parts have weights in different formats."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.values()], -1)


class KernelHead(KernelLinear):
    """LM head, by the kernel for few rows; logits are float32."""

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, is_wide=True)


class KernelTable(KernelLinear, Table):
    """Embedding table, quantized or not, of which only the rows of given tokens are read."""

    def rows(self, numbers: Tensor) -> Tensor:
        return self.plain_weight(self.dtype, numbers.flatten().contiguous()).view(
            *numbers.shape, -1
        )


class KernelTiedHead(KernelTable, KernelHead, TiedHead):
    """LM head that shares its weights with the embedding table."""


class KernelLayers(Layers):
    """All transformer blocks; calls of a kernel compute a pass, and write the cache."""

    def __init__(self, plain: Layers, kernels: Kernels) -> None:
        """Takes over the modules of `plain`, whose linear layers are `KernelLinear` already."""
        super().__init__(plain)
        self.kernels = kernels

    def forward(self, x_BTE: Tensor, shared: Pass) -> Tensor:
        is_long = shared.is_prompt or x_BTE.shape[1] > LONGEST_BLOCK
        if shared.cache.is_hosted or (is_long and not self.reads_prompts):
            return super().forward(x_BTE, shared)
        x_BTE = x_BTE.clone()
        arguments = self.arguments(x_BTE, shared.cache, shared.mask_TT, shared.queries_LBTHD)
        cos = shared.rotary.cos
        require(cos.numel() == arguments.B * arguments.T * arguments.D, tensors=(cos,))
        arguments.fill(cos=cos, sin=shared.rotary.signed_sin)
        for arguments.first in range(len(self) if is_long else 1):
            self.kernels.call("pass", arguments, x_BTE.dtype, is_long)
        return x_BTE

    def arguments(
        self, x_BTE: Tensor, cache: Cache, mask_TT: Tensor | None, queries_LBTHD: Tensor | None
    ) -> PassArguments:
        """Kernel arguments, but for cos and sin, of a pass of all layers that overwrites x."""
        L, _, K, _, _ = cache.keys.shape
        E = x_BTE.shape[2]
        first = self[0]
        assert isinstance(first, Layer)
        H, held_K, _ = first.self_attn.heads
        sizes = (len(self), held_K, first.mlp.gate_up_proj.in_features)
        require(sizes == (L, K, E), x_BTE.is_contiguous(), tensors=(x_BTE,))
        arguments = PassArguments(x=x_BTE, L=L, E=E, H=H)
        arguments.fill(layers=ctypes.addressof(self._weights), scale=first.residual_scale)
        arguments.fill(eps=first.input_layernorm.eps, kv_layer=cache.keys.stride()[0])
        slots = [cache.keys, cache.values]
        if isinstance(cache, StreamingCache):
            slots.append(cache.raw_keys)
            arguments.raw_keys = cache.raw_keys
        self.kernels.set_slots(arguments, x_BTE, slots, cache.lengths, mask_TT)
        if queries_LBTHD is not None:
            W = queries_LBTHD.shape[2]
            wanted = (L, arguments.B, W, H, arguments.D)
            is_right = (queries_LBTHD.shape, queries_LBTHD.dtype) == (wanted, x_BTE.dtype)
            require(is_right, queries_LBTHD[0].is_contiguous(), tensors=(queries_LBTHD,))
            arguments.fill(queries=queries_LBTHD, W=W, queries_layer=queries_LBTHD.stride(0))
        return arguments

    @cached_property
    def _weights(self) -> ctypes.Array[LayerWeights]:
        """Addresses of the weights of all layers, kept, as weights do not move in memory."""
        return (LayerWeights * len(self))(*map(weights_of, self))


def weights_of(layer: nn.Module) -> LayerWeights:
    """Addresses of the weights of a transformer block, for the C++ kernels."""
    assert isinstance(layer, Layer)
    attention = layer.self_attn
    qkv = attention.qkv_proj
    parts = qkv.values() if isinstance(qkv, KernelParts) else [qkv]
    return LayerWeights(
        qkv=(Matrix * 3)(*map(matrix_of, parts)),
        o=matrix_of(attention.o_proj),
        gate_up=matrix_of(layer.mlp.gate_up_proj),
        down=matrix_of(layer.mlp.down_proj),
        input_norm=layer.input_layernorm.weight,
        post_norm=layer.post_attention_layernorm.weight,
        q_norm=getattr(attention.q_norm, "weight", None),
        k_norm=getattr(attention.k_norm, "weight", None),
        is_unrotated=not attention.rotates,
    )


def matrix_of(linear: nn.Module) -> Matrix:
    """Addresses, sizes and format of a linear layer's weights and bias, for the C++ kernels."""
    assert isinstance(linear, KernelLinear)
    return Matrix(
        weights=linear.weight,
        bias=linear.bias,
        N=linear.out_features,
        E=linear.in_features,
        form=linear.form,
    )


def keep_quantized(model: Llama, places: Mapping[str, Tensor], stored: Stored) -> dict[str, Tensor]:
    """Replaces linear layers by empty quantized ones, for a file's matrices in `stored`: (name,
    shape) to `Form`. Returns uint8 tensors to fill, by name; `places` has, by name, the plain
    weights of these layers. If q, k and v differ in format, the fused layer becomes three;
    another stays plain unless its parts have one format, or are one matrix in the file."""
    names_at: dict[int, list[str]] = {}  # by memory: a fused layer's parts have other names than it
    for name, place in places.items():
        names_at.setdefault(place.untyped_storage().data_ptr(), []).append(name)
    todo = [
        (path, layer, names_at[layer.weight.untyped_storage().data_ptr()])
        for path, layer in model.named_modules()
        if isinstance(layer, KernelLinear)
    ]
    kept: dict[str, Tensor] = {}
    while todo:
        path, layer, names = todo.pop()
        E = layer.in_features
        keys = [(f"model.{path}.weight", tuple(layer.weight.shape))]  # if fused in the file
        if keys[0] not in stored:
            keys = [(name, tuple(places[name].shape)) for name in names]
        form, *others = {stored.get(key) for key in keys}
        if others and path.endswith(".qkv_proj"):
            parts = KernelParts()
            model.set_submodule(path, parts)
            for name, (N, _) in keys:
                empty = Linear.empty(E, N, dtype=layer.dtype, bias=layer.bias is not None)
                part = KernelLinear(empty, layer.kernels)
                key = name.split(".")[-2]
                parts[key] = part
                todo.append((f"{path}.{key}", part, [name]))
            continue
        is_in_panels = len(names) == 1 or not any(len(places[name]) % PANEL for name in names)
        if others or not (form and is_in_panels):
            continue
        shape = packed_shape(layer.out_features, E, form)
        packed_NX = torch.empty(shape, dtype=torch.uint8)
        model.set_submodule(path, type(layer)(layer, layer.kernels, packed_NX, form))
        ends = itertools.accumulate(shape[0] for _, shape in keys[:-1])
        kept |= zip([name for name, _ in keys], packed_NX.tensor_split([*ends]), strict=True)
    model.num_bytes = sum(weight.nbytes for weight in model.parameters())
    forms = [it.form for it in model.modules() if isinstance(it, KernelLinear)]
    model.layers.reads_prompts = Form.PLAIN not in forms and "AMX" not in layer.kernels.instructions
    log.debug("%d of %d matrices stay quantized", len(forms) - forms.count(Form.PLAIN), len(forms))
    return kept


def quantized_copy(model: Llama) -> Llama:
    """A copy of a model on the CPU kernels with 4-bit linear layers, for guessing only.
    The LM head has 8 bits: SmolLM2's likeliest token stays so in 99 % of cases, with 4 in 79 %.
    Layers of at most 6 bits stay: 4 bits would save at most a third, and share no memory."""

    def quantized(layer: KernelLinear) -> KernelLinear:
        form = Form.Q8 if isinstance(layer, KernelHead) else Form.Q4
        # The gate and the up part of a fused matrix are whole panels each.
        is_whole = form == Form.Q8 or layer.out_features % (2 * PANEL) == 0
        if not is_whole or layer.in_features % GROUP or layer.form.bits <= max(form.bits, 6):
            return layer
        packed_NX = quantize(layer.plain_weight(torch.float32), form.bits, layer.kernels.repack)
        return type(layer)(layer, layer.kernels, packed_NX, form)

    factories: Factories = {
        **dict.fromkeys((KernelLinear, KernelHead, KernelTiedHead), quantized),
        KernelLayers: lambda layers: KernelLayers(layers, layers.kernels),  # its own addresses
    }
    return copy_with(model, factories)
