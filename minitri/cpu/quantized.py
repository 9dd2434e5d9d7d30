"""Linear layers with weights of 4 or 8 bits, for the kernels.

Groups of 32 weights of a row share a scale and, in 4 bits, an offset, both float16: weight = scale
q + offset, as in GGUF's Q4_0, Q4_1 and Q8_0. A quantized matrix is a (N, bytes) uint8 tensor whose
rows hold the q of all groups, then their scales, then their offsets; see `kernels.cpp`.

`quantized_twin` is a copy of a model in 4 bits that shares everything else with it. It reads a
third of the bytes per pass, which makes it a good proposer for the model itself.

Legend: N out_features, E in_features, G groups of a row, Q = 32 weights of a group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitri.cpu.fused import KernelLinear, take_over
from minitri.model.llama import Llama

GROUP = 32
TINY = 1e-12
"""Stands for a scale of 0."""
ROWS_AT_ONCE = 4096
"""Rows that are quantized at a time, which bounds the memory of doing it."""


class QuantizedLinear(KernelLinear):
    """y = x W^T + b with W in 4 or 8 bits."""

    def __init__(self, like: KernelLinear, packed: Tensor, bits: int) -> None:
        """Another layer's shape and bias with these weights."""
        take_over(self, like)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bits = bits

    def plain_weight(self, dtype: torch.dtype) -> Tensor:
        """W, (N, E)."""
        return dequantize(self.weight, self.in_features, self.bits).to(dtype)


def quantize(weight_NE: Tensor, bits: int) -> Tensor:
    """A matrix in 4 bits, in which each group's extremes are met, or in 8, which are symmetric."""
    return torch.cat([_quantize_rows(rows, bits) for rows in weight_NE.split(ROWS_AT_ONCE)])


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


def dequantize(packed_NX: Tensor, in_features: int, bits: int) -> Tensor:
    """The matrix in float32, (N, E)."""
    G = in_features // GROUP
    widths = [(G + G % 2) * GROUP * bits // 8, 2 * G] + [2 * G] * (bits == 4)
    quants, *factors = packed_NX.split(widths, dim=1)
    factors = [part.contiguous().view(torch.float16).float().unsqueeze(2) for part in factors]
    quants_NGQ = quants.unflatten(1, (-1, GROUP))
    if bits == 8:
        return (quants_NGQ.view(torch.int8)[:, :G] * factors[0]).flatten(1)
    halves = torch.stack((quants_NGQ & 15, quants_NGQ >> 4), 2).flatten(1, 2)[:, :G]
    return (halves * factors[0] + factors[1]).flatten(1)


def quantized_twin(model: Llama) -> Llama:
    """A copy of a model on kernels with linear layers of 4 bits; it shares the rest.

    Its LM head has 8 bits: with 4 of them SmolLM2's twin would agree with it on 79 % of the tokens,
    instead of 99.
    """
    twin = _twin(model)
    assert isinstance(twin, Llama)
    twin.num_bytes = sum(
        layer.weight.nbytes for layer in twin.modules() if isinstance(layer, QuantizedLinear)
    )
    twin._lent_embedding = model.embed
    return twin


def _twin(module: nn.Module) -> nn.Module:
    if isinstance(module, KernelLinear) and module.bits == 16 and module.in_features % GROUP == 0:
        bits = 8 if module.is_head else 4
        return QuantizedLinear(module, quantize(module.weight, bits), bits)
    twin = take_over(object.__new__(type(module)), module)
    for name, child in module.named_children():
        twin.add_module(name, _twin(child))
    return twin
