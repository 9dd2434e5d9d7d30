"""Quantized matrices of a GGUF file, as plain numbers or repacked for the CPU kernels (layout:
`cpu/quantized.py`).

A row is a chain of blocks of 32 weights. A block holds their scale d, in Q4_1 their offset m, both
float16, and their q: in 4 bits, 16 bytes whose low halves are the first 16 of them and whose high
halves are the others. A weight is d (q - 8) in Q4_0, d q + m in Q4_1, and d q in Q8_0. No number
changes on the way: 8 d has the digits of d.

Legend: N rows, G blocks of a row, X bytes of a block.
"""

import numpy as np
import torch
from torch import Tensor

from minitri.cpu.quantized import GROUP, pack, rows_at_once

BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""Types that the kernels can read, and the bits of their q."""


def unpack(rows: np.ndarray, kind: str, num_columns: int) -> Tensor:
    """A matrix as it is stored, (N, bytes of a row), in float32: the bits that the `gguf` package
    gives it, in a sixth of the time."""
    stored_NX = torch.from_numpy(rows.copy())  # the file is mapped for reading only
    weight_NE = torch.empty(len(rows), num_columns)
    step = rows_at_once(num_columns)
    for part_NX, place_NE in zip(stored_NX.split(step), weight_NE.split(step), strict=True):
        _unpack_rows(kind, part_NX, place_NE)
    return weight_NE


def _unpack_rows(kind: str, stored_NX: Tensor, place_NE: Tensor) -> None:
    place_NGQ = place_NE.unflatten(1, (-1, GROUP))
    factors, quants_NGX = _parts(stored_NX.unflatten(1, (place_NGQ.shape[1], -1)), kind)
    scales_NG1, *offsets_NG1 = factors.float().split(1, 2)
    if BITS[kind] == 8:
        place_NGQ.copy_(quants_NGX.view(torch.int8)).mul_(scales_NG1)
        return
    for half_NGX, half in zip(_halves(quants_NGX), place_NGQ.chunk(2, 2), strict=True):
        half.copy_(half_NGX)
        if offsets_NG1:
            half.mul_(scales_NG1).add_(offsets_NG1[0])
        else:
            half.sub_(8).mul_(scales_NG1)


def repack(rows: np.ndarray, kind: str, num_columns: int) -> Tensor:
    """A matrix as it is stored, (N, bytes of a row), in the layout of the kernels."""
    stored_NX = torch.from_numpy(rows.copy())  # the file is mapped for reading only
    blocks_NGX = stored_NX.unflatten(1, (num_columns // GROUP, -1))
    parts = blocks_NGX.split(rows_at_once(num_columns))
    return torch.cat([_repack_blocks(part_NGX, kind) for part_NGX in parts])


def _repack_blocks(blocks_NGX: Tensor, kind: str) -> Tensor:
    factors, quants_NGX = _parts(blocks_NGX, kind)
    scales_NG = factors[..., 0]
    if BITS[kind] == 8:
        return pack(quants_NGX, scales_NG)
    offsets_NG = factors[..., 1] if kind == "Q4_1" else -8 * scales_NG
    return pack(torch.cat(_halves(quants_NGX), 2), scales_NG, offsets_NG)


def _parts(blocks_NGX: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Scale, and offset if there is one, of each block; and the bytes of its q."""
    begin = 4 if kind == "Q4_1" else 2
    return blocks_NGX[..., :begin].contiguous().view(torch.float16), blocks_NGX[..., begin:]


def _halves(quants_NGX: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the other q of 4 bits."""
    return quants_NGX & 15, quants_NGX >> 4
