"""Matrices of 4 to 8 bits, in the layout that the CPU kernels read.

Groups of 32 weights of a row share a scale and an offset: weight = scale q + offset. A quantized
matrix is a uint8 tensor (N, X), N padded to panels of 16 rows, which are stored together: q,
scales, then offsets, each group by group, interleaved over the rows of the panel (`quantized.h`).

Legend: N outputs, E inputs, X bytes of a row, G groups, Q weights of a group, W words, P panels.
"""

from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
PANEL = 16
NUMBERS_AT_ONCE = 1 << 19  # weights that are quantized or dequantized at a time, in a cache


class Form(IntEnum):
    """Formats of plain and quantized weights, with their numbers in C++.
    Scales and offsets are float16, or small integers times one per 256 weights (K-quants)."""

    Q4, Q5, Q8, PLAIN = 4, 5, 8, 16
    Q4_K, Q5_K, Q6_K = 36, 37, 38

    @property
    def bits(self) -> int:
        """Bits of one quantized number q, or of a plain weight."""
        return self % 32

    @property
    def is_nested(self) -> bool:
        return self > 32


def packed_shape(num_rows: int, in_features: int, form: int) -> tuple[int, int]:
    """Shape (N, X) of a quantized matrix of `num_rows` rows, which are padded to whole panels."""
    G = in_features // GROUP
    form = Form(form)
    num_halves = -(-G // 8) if form.is_nested else G
    width = 4 * form.bits * G + 2 * num_halves * (1 + (form.bits < 6)) + 2 * G * form.is_nested
    return -(-num_rows // PANEL) * PANEL, width


def quantize(weight_NE: Tensor, bits: int) -> Tensor:
    """Quantizes a matrix to 4 bits, from least to largest of each group, or to 8, symmetric."""
    # Whole panels at a time, which a CPU cache can hold.
    num_rows = max(1, NUMBERS_AT_ONCE // (PANEL * weight_NE.shape[1])) * PANEL
    return torch.cat([_quantize_rows(rows, bits) for rows in weight_NE.split(num_rows)])


def _quantize_rows(weight_NE: Tensor, bits: int) -> Tensor:
    groups_NGQ = weight_NE.to(torch.float32, copy=True).unflatten(1, (-1, GROUP))
    least = groups_NGQ.amin(2, keepdim=True)  # `aminmax` would take four times as long
    most = groups_NGQ.amax(2, keepdim=True)
    if bits == 4:
        limits = (0, 15)
        factors = [((most - least) / 15).half(), least.half()]
        groups_NGQ -= factors[1]
    else:
        limits = (-127, 127)
        factors = [(torch.maximum(-least, most) / 127).half()]
    groups_NGQ /= factors[0].float().clamp_min(1e-12)
    quants_NGQ = groups_NGQ.round_().clamp_(*limits).to(torch.int8).view(torch.uint8)
    parts = (_words(quants_NGQ, bits), *(factor.squeeze(2) for factor in factors))
    rows = -len(quants_NGQ) % PANEL
    lanes = (F.pad(it, (0, 0, 0, rows)).unflatten(0, (-1, PANEL)).transpose(1, 2) for it in parts)
    panels_P = [it.contiguous().flatten(1).view(torch.uint8) for it in lanes]
    return torch.cat(panels_P, 1).view(len(quants_NGQ) + rows, -1)


def _words(bits_NGQ: Tensor, num_bits: int) -> Tensor:
    """Packs `num_bits` bits of each q into words (N, W): pairs of q, lowest bits first."""
    pairs = bits_NGQ.contiguous().flatten(1).view(torch.int16).int()
    words = pairs & 0xFF | (pairs & 0xFF00) << 8
    while num_bits < 16:  # the second word of two goes above the bits of the first
        two = words.view(torch.int64)
        words = (two | two >> 32 - num_bits).int()
        num_bits *= 2
    return words
