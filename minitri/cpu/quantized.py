"""Matrices of 4 to 8 bits, as the kernels read them.

Groups of 32 weights of a row share a scale and an offset: weight = scale q + offset. A quantized
matrix is a (N, bytes) uint8 tensor whose rows hold the q of all groups, then their scales, then
their offsets; `quantized.h` says how they lie.

Legend: N out_features, E in_features, X bytes of a row, G groups of a row, Q = 32 weights of a
group.
"""

from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
NUMBERS_AT_ONCE = 1 << 19
"""Weights that are quantized or dequantized at a time: what that takes stays in a cache."""


class Form(IntEnum):
    """How weights lie, by the numbers that the kernels know. Scales and offsets are float16; those
    of GGUF's K-quants are small integers in units, which are float16 for 256 weights each."""

    Q4, Q5, Q8, PLAIN = 4, 5, 8, 16
    Q4_K, Q5_K, Q6_K = 36, 37, 38

    @property
    def bits(self) -> int:
        """Of a q, or more: of a plain weight."""
        return self % 32

    @property
    def is_nested(self) -> bool:
        return self > 32


def row_widths(in_features: int, form: int) -> list[int]:
    """Bytes of the parts of a row: the low bits of its q and the others, then scales and offsets;
    or units of scales and of offsets before these."""
    G = in_features // GROUP
    bits = Form(form).bits
    low = (G + G % 2) * GROUP * (bits if bits == 8 else 4) // 8
    high = -(-G * (bits - 4) // 8) * GROUP * (bits < 8)
    if not Form(form).is_nested:
        return [low, high, 2 * G, 2 * G * (bits < 8)]
    units = -(-G // 16) * 2
    if bits == 6:
        return [low, high, 2 * units, 0, 16 * units, 0]
    return [low, high, 2 * units, 2 * units, 8 * units, 8 * units]


def rows_at_once(num_columns: int) -> int:
    """How many rows of a quantized matrix to read or write at a time."""
    return max(1, NUMBERS_AT_ONCE // num_columns)


def quantize(weight_NE: Tensor, bits: int) -> Tensor:
    """A matrix in 4 bits, in which each group's extremes are met, or in 8, which are symmetric."""
    parts = weight_NE.split(rows_at_once(weight_NE.shape[1]))
    return torch.cat([_quantize_rows(rows, bits) for rows in parts])


def _quantize_rows(weight_NE: Tensor, bits: int) -> Tensor:
    groups_NGQ = weight_NE.to(torch.float32, copy=True).unflatten(1, (-1, GROUP))
    least = groups_NGQ.amin(2, keepdim=True)  # together they take four times as long
    most = groups_NGQ.amax(2, keepdim=True)
    if bits == 4:
        limits = (0, 15)
        factors = [((most - least) / 15).half(), least.half()]
        groups_NGQ -= factors[1]
    else:
        limits = (-127, 127)
        factors = [(torch.maximum(-least, most) / 127).half()]
    groups_NGQ /= factors[0].float().clamp_min(1e-12)
    quants_NGQ = groups_NGQ.round_().clamp_(*limits).to(torch.int8)
    return pack(Form(bits), weight_NE.shape[1], *split_bits(quants_NGQ, bits), *factors)


def split_bits(quants_NGQ: Tensor, bits: int) -> list[Tensor]:
    """The first two parts of rows, of q of 8 bits (-128 to 127) or of less, from 0 on."""
    G = quants_NGQ.shape[1]
    quants_NGQ = F.pad(quants_NGQ.view(torch.uint8), (0, 0, 0, -G % 8))
    if bits == 8:
        return [quants_NGQ[:, : G + G % 2], quants_NGQ[:, :0]]
    low_NPQ = quants_NGQ[:, 0::2] & 15 | quants_NGQ[:, 1::2] << 4
    places = torch.arange(0, 8, max(1, bits - 4), dtype=torch.uint8)[:, None]
    others = (quants_NGQ >> 4).unflatten(1, (-1, len(places))) << places
    high = others.sum(2, dtype=torch.uint8)[:, : -(-G // len(places))]
    return [low_NPQ[:, : (G + 1) // 2], high if bits > 4 else high[:, :0]]


def pack(form: Form, in_features: int, *parts: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows of bytes: their parts in the order of `row_widths`, padded with zeros; float16 ones may
    be float32. Without offsets their parts are left out."""
    widths = row_widths(in_features, form)
    rows = parts[0].new_empty(len(parts[0]), sum(widths), dtype=torch.uint8) if out is None else out
    filled = [it for it, width in zip(rows.split(widths, 1), widths, strict=True) if width]
    given = [it for it in parts if it.numel()]
    for place, part in zip(filled, given, strict=True):
        data = part.half().contiguous() if part.is_floating_point() else part
        data = data.view(torch.uint8)
        num_bytes = data.shape[1:].numel()
        place[:, :num_bytes].unflatten(1, data.shape[1:]).copy_(data)
        place[:, num_bytes:] = 0
    return rows
