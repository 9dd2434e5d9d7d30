"""Linear layers with weights of 4 or 8 bits, for the kernels.

Groups of 32 weights of a row share a scale and, in 4 bits, an offset, both float16: weight = scale
q + offset, as in GGUF's Q4_0, Q4_1 and Q8_0. A quantized matrix is a (N, bytes) uint8 tensor whose
rows hold the q of all groups, then their scales, then their offsets; see `kernels.cpp`.

A model whose file holds such numbers may keep them. `quantized_twin` is a copy of a model in 4 or 8
bits that shares everything else with it. In 4 it reads a third of the bytes per pass, which makes
it a good proposer for the model itself.

Legend: N out_features, E in_features, X bytes of a row, G groups of a row, Q = 32 weights of a
group.
"""

import logging
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitri.cpu.fused import KernelLinear, KernelTiedHead, take_over
from minitri.model.linear import Linear
from minitri.model.llama import Llama

log = logging.getLogger("minitri")

Stored = Mapping[tuple[str, tuple[int, ...]], int]
"""Bits of the quantized matrices of a file, by name and shape."""

GROUP = 32
TINY = 1e-12
"""Stands for a scale of 0."""
NUMBERS_AT_ONCE = 1 << 19
"""Weights that are quantized or dequantized at a time: what that takes besides stays in a cache."""


class QuantizedLinear(KernelLinear):
    """y = x W^T + b with W in 4 or 8 bits."""

    def __init__(self, like: KernelLinear, packed_NX: Tensor, bits: int) -> None:
        """Another layer's shape and bias with these weights."""
        take_over(self, like)
        self.weight = nn.Parameter(packed_NX, requires_grad=False)
        self.bits = bits

    def plain_weight(self, dtype: torch.dtype) -> Tensor:
        """W, (N, E)."""
        return dequantize(self.weight, self.in_features, self.bits, dtype)


class QuantizedTiedHead(QuantizedLinear, KernelTiedHead):
    """An LM head in 4 or 8 bits that is the embedding table, too."""

    def __init__(self, like: KernelLinear, packed_NX: Tensor, bits: int) -> None:
        """Rows have the number type of the weights that were there."""
        super().__init__(like, packed_NX, bits)
        self.dtype = like.weight.dtype

    def rows(self, numbers: Tensor) -> Tensor:
        packed = self.weight[numbers.flatten()]
        rows = dequantize(packed, self.in_features, self.bits, self.dtype)
        return rows.view(*numbers.shape, self.in_features)


def row_widths(in_features: int, bits: int) -> list[int]:
    """Bytes of a row: of its q, of its scales and, in 4 bits, of its offsets."""
    G = in_features // GROUP
    return [(G + G % 2) * GROUP * bits // 8, 2 * G] + [2 * G] * (bits == 4)


def quantize(weight_NE: Tensor, bits: int) -> Tensor:
    """A matrix in 4 bits, in which each group's extremes are met, or in 8, which are symmetric."""
    num_rows = rows_at_once(weight_NE.shape[1])
    return torch.cat([_quantize_rows(rows, bits) for rows in weight_NE.split(num_rows)])


def rows_at_once(num_columns: int) -> int:
    """In how large parts to read or write a quantized matrix."""
    return max(1, NUMBERS_AT_ONCE // num_columns)


def _quantize_rows(weight_NE: Tensor, bits: int) -> Tensor:
    groups_NGQ = weight_NE.float().unflatten(1, (-1, GROUP))
    least_NG, most_NG = groups_NGQ.aminmax(dim=2)
    if bits == 8:
        scales_NG = (torch.maximum(-least_NG, most_NG) / 127).half()
        quants_NGQ = groups_NGQ / scales_NG.float().clamp_min(TINY).unsqueeze(2)
        return pack(quants_NGQ.round_().clamp_(-127, 127).to(torch.int8), scales_NG, None)
    scales_NG, offsets_NG = ((most_NG - least_NG) / 15).half(), least_NG.half()
    steps_NGQ = (groups_NGQ - offsets_NG.float().unsqueeze(2)).div_(
        scales_NG.float().clamp_min(TINY).unsqueeze(2)
    )
    return pack(steps_NGQ.round_().clamp_(0, 15).to(torch.uint8), scales_NG, offsets_NG)


def pack(quants_NGQ: Tensor, scales_NG: Tensor, offsets_NG: Tensor | None) -> Tensor:
    """Rows of bytes: 4 bits (0 to 15) with offsets, else 8 bits (-128 to 127)."""
    if quants_NGQ.shape[1] % 2:
        quants_NGQ = F.pad(quants_NGQ, (0, 0, 0, 1))
    parts = [quants_NGQ.view(torch.uint8), scales_NG.half().contiguous().view(torch.uint8)]
    if offsets_NG is not None:
        parts[0] = quants_NGQ[:, 0::2] | quants_NGQ[:, 1::2] << 4
        parts.append(offsets_NG.half().contiguous().view(torch.uint8))
    return torch.cat([part.flatten(1) for part in parts], 1)


def dequantize(
    packed_NX: Tensor, in_features: int, bits: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The matrix, (N, E), computed in float32."""
    weight_NE = torch.empty(len(packed_NX), in_features, dtype=dtype)
    num_rows = rows_at_once(in_features)
    for packed, rows in zip(packed_NX.split(num_rows), weight_NE.split(num_rows), strict=True):
        rows.copy_(_dequantize_rows(packed, in_features, bits))
    return weight_NE


def _dequantize_rows(packed_NX: Tensor, in_features: int, bits: int) -> Tensor:
    G = in_features // GROUP
    quants, *factors = packed_NX.split(row_widths(in_features, bits), dim=1)
    factors = [part.contiguous().view(torch.float16).float().unsqueeze(2) for part in factors]
    quants_NGQ = quants.unflatten(1, (-1, GROUP))
    if bits == 8:
        return (quants_NGQ.view(torch.int8)[:, :G] * factors[0]).flatten(1)
    halves = torch.stack((quants_NGQ & 15, quants_NGQ >> 4), 2).flatten(1, 2)[:, :G]
    return (halves * factors[0]).add_(factors[1]).flatten(1)


def keep_quantized(model: Llama, places: Mapping[str, Tensor], stored: Stored) -> set[str]:
    """Makes the layers of a model on kernels quantized, and empty, where a file has them so.

    The tensors of the file fill `places`, views of weights; several fill a fused projection, which
    needs all of them in as many bits. Returns the names of those that are to come quantized.
    """
    fillers: dict[int, list[str]] = {}
    for name, place in places.items():
        fillers.setdefault(place.untyped_storage().data_ptr(), []).append(name)
    layers = {p: layer for p, layer in model.named_modules() if isinstance(layer, KernelLinear)}
    kept: set[str] = set()
    for path, layer in layers.items():
        names = fillers[layer.weight.untyped_storage().data_ptr()]
        kinds = {stored.get((name, tuple(places[name].shape))) for name in names}
        bits = kinds.pop() if len(kinds) == 1 else None
        if bits is None:
            continue
        shape = (layer.out_features, sum(row_widths(layer.in_features, bits)))
        kind = QuantizedTiedHead if isinstance(layer, KernelTiedHead) else QuantizedLinear
        model.set_submodule(path, kind(layer, torch.empty(shape, dtype=torch.uint8), bits))
        kept |= set(names)
    model.num_bytes = sum(weight.nbytes for weight in model.parameters())
    num_kept = sum(isinstance(layer, QuantizedLinear) for layer in model.modules())
    log.info("%d of %d matrices stay quantized", num_kept, len(layers))
    return kept


def has_at_most(model: Llama, bits: int) -> bool:
    """Whether no layer of the blocks has more bits, so that a twin would be hardly smaller."""
    layers = (layer for layer in model.layers.modules() if isinstance(layer, Linear))
    return all(isinstance(layer, QuantizedLinear) and layer.bits <= bits for layer in layers)


def quantized_twin(model: Llama, bits: int = 4) -> Llama:
    """A copy of a model on kernels with linear layers of 4 or 8 bits; it shares the rest, among it
    those layers of the model that have as few.

    Its LM head has 8 bits: with 4 of them SmolLM2's twin would agree with it on 79 % of the tokens,
    instead of 99.
    """
    twin, shared = _twin(model, bits), {id(weight) for weight in model.parameters()}
    assert isinstance(twin, Llama)
    twin.num_bytes = sum(w.nbytes for w in twin.parameters() if id(w) not in shared)
    twin.lent_embedding = model.embed
    return twin


def _twin(module: nn.Module, bits: int) -> nn.Module:
    if isinstance(module, KernelLinear) and module.in_features % GROUP == 0:
        bits = 8 if module.is_head else bits
        if module.bits > bits:
            weight_NE = module.plain_weight(torch.float32)
            return QuantizedLinear(module, quantize(weight_NE, bits), bits)
    twin = take_over(object.__new__(type(module)), module)
    for name, child in module.named_children():
        twin.add_module(name, _twin(child, bits))
    return twin
