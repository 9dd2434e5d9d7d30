"""Matrices of 4 to 8 bits, in the layout that the CPU kernels read.

Groups of 32 weights of a row share a scale and an offset: weight = scale q + offset. A quantized
matrix is a uint8 tensor (N, X), N padded to panels of 16 rows, which are stored together: q,
scales, then offsets, each group by group, interleaved over the rows of the panel (`quantized.h`).
Legend: N outputs, E inputs, X bytes of a row, G groups, Q weights of a group.
"""

from collections.abc import Callable
from enum import IntEnum

import torch
from torch import Tensor

GROUP = 32  # weights of a row that share a scale
PANEL = 16  # rows that are stored together
NUMBERS_AT_ONCE = 1 << 19  # weights that are quantized at a time, so that a CPU cache holds them


class Form(IntEnum):
    """Formats of plain and quantized weights, with their numbers in C++. Scales and offsets are
    float16; with _K (GGUF's K-quants), small integers times a float16 for each 256 weights."""

    Q4, Q5, Q8, PLAIN = 4, 5, 8, 16
    Q4_K, Q5_K, Q6_K = 36, 37, 38

    @property
    def bits(self) -> int:
        """Bits of one quantized number q; 16 for plain weights, also of float32."""
        return self % 32

    @property
    def is_nested(self) -> bool:
        return self > 32


def packed_shape(num_rows: int, in_features: int, form: int) -> tuple[int, int]:
    """Shape (N, X) in bytes of a matrix in the `Form` `form`, its rows padded to whole panels."""
    G = in_features // GROUP
    form = Form(form)
    num_halves = -(-G // 8) if form.is_nested else G
    width = 4 * form.bits * G + 2 * num_halves * (1 + (form.bits < 6)) + 2 * G * form.is_nested
    return -(-num_rows // PANEL) * PANEL, width


def quantize(weight_NE: Tensor, bits: int, repack: Callable[..., None]) -> Tensor:
    """Quantizes (N, E) to (N, X) bytes: 4 bits from least to largest of a group, or 8, symmetric.
    `repack` is `Kernels.repack`, which converts blocks of GGUF's Q4_1 or Q8_0 to their layout."""
    N, E = weight_NE.shape
    packed_NX = torch.empty(packed_shape(N, E, bits), dtype=torch.uint8)
    num_rows = max(1, NUMBERS_AT_ONCE // (PANEL * E)) * PANEL
    for rows, place in zip(weight_NE.split(num_rows), packed_NX.split(num_rows), strict=True):
        repack(_blocks(rows, bits).numpy(), bits, torch.arange(len(rows)), place, E)
    return packed_NX


def _blocks(weight_NE: Tensor, bits: int) -> Tensor:
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
    quants_NGQ = groups_NGQ.round_().clamp_(*limits).to(torch.int8)
    if bits == 4:
        low, high = quants_NGQ.chunk(2, 2)
        quants_NGQ = low | high << 4
    parts = (part.view(torch.uint8) for part in (*factors, quants_NGQ))
    return torch.cat([*parts], 2).flatten(1)
