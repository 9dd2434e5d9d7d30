"""Matrices of 4 or 8 bits, as the kernels read them.

Groups of 32 weights of a row share a scale and, in 4 bits, an offset, both float16: weight = scale
q + offset, as in GGUF's Q4_0, Q4_1 and Q8_0. A quantized matrix is a (N, bytes) uint8 tensor whose
rows hold the q of all groups, then their scales, then their offsets; see `linear.h`.

Legend: N out_features, E in_features, X bytes of a row, G groups of a row, Q = 32 weights of a
group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
NUMBERS_AT_ONCE = 1 << 19
"""Weights that are quantized or dequantized at a time: what that takes stays in a cache."""


def row_widths(in_features: int, bits: int) -> list[int]:
    """Bytes of a row: of its q, of its scales and, in 4 bits, of its offsets."""
    G = in_features // GROUP
    return [(G + G % 2) * GROUP * bits // 8, 2 * G] + [2 * G] * (bits == 4)


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
    return pack(groups_NGQ.round_().clamp_(*limits).to(torch.int8), *factors)


def pack(quants_NGQ: Tensor, *factors_NG: Tensor) -> Tensor:
    """Rows of bytes: with scales of 8 bits (-128 to 127), with offsets, too, of 4 (0 to 15)."""
    quants_NGQ = F.pad(quants_NGQ.view(torch.uint8), (0, 0, 0, quants_NGQ.shape[1] % 2))
    if len(factors_NG) == 2:
        quants_NGQ = quants_NGQ[:, 0::2] | quants_NGQ[:, 1::2] << 4
    factors = (part.half().contiguous().view(torch.uint8) for part in factors_NG)
    return torch.cat([part.flatten(1) for part in (quants_NGQ, *factors)], 1)


def dequantize(
    packed_NX: Tensor, in_features: int, bits: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The matrix, (N, E), computed in float32."""
    parts = packed_NX.split(rows_at_once(in_features))
    return torch.cat([_dequantize_rows(rows, in_features, bits).to(dtype) for rows in parts])


def _dequantize_rows(packed_NX: Tensor, in_features: int, bits: int) -> Tensor:
    G = in_features // GROUP
    parts = packed_NX.split(row_widths(in_features, bits), dim=1)
    scales, *offsets = (p.contiguous().view(torch.float16).float().unsqueeze(2) for p in parts[1:])
    quants_NGQ = parts[0].unflatten(1, (-1, GROUP))
    if bits == 8:
        return (quants_NGQ.view(torch.int8)[:, :G] * scales).flatten(1)
    halves = torch.stack((quants_NGQ & 15, quants_NGQ >> 4), 2).flatten(1, 2)[:, :G]
    return (halves * scales).add_(offsets[0]).flatten(1)
