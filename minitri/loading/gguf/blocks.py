"""Quantized matrices of a GGUF file, as plain numbers or repacked for the CPU kernels (layout:
`cpu/quantized.py`).

A row is a chain of blocks of 32 weights. A block holds their scale d, in Q4_1 their offset m, both
float16, and their q: in 4 bits, 16 bytes whose low halves are the first 16 of them and whose high
halves are the others. A weight is d (q - 8) in Q4_0, d q + m in Q4_1, and d q in Q8_0. No number
changes on the way: 8 d has the digits of d.

Legend: N rows, G blocks of a row, X bytes of a block.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minitri.cpu.quantized import GROUP, pack, rows_at_once

BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""Types that the kernels can read, and the bits of their q."""


def unpack(rows: np.ndarray, kind: str, num_columns: int) -> Tensor:
    """A matrix as it is stored, (N, bytes of a row), in float32: the bits that the `gguf` package
    gives it, in a sixth of the time."""
    return _in_parts(_unpack_blocks, rows, kind, num_columns)


def repack(rows: np.ndarray, kind: str, num_columns: int) -> Tensor:
    """A matrix as it is stored, (N, bytes of a row), in the layout of the kernels."""
    return _in_parts(_repack_blocks, rows, kind, num_columns)


def _in_parts(
    convert: Callable[[Tensor, str], Tensor], rows: np.ndarray, kind: str, num_columns: int
) -> Tensor:
    stored_NX = torch.from_numpy(rows.copy())  # the file is mapped for reading only
    blocks_NGX = stored_NX.unflatten(1, (num_columns // GROUP, -1))
    parts = blocks_NGX.split(rows_at_once(num_columns))
    return torch.cat([convert(part_NGX, kind) for part_NGX in parts])


def _unpack_blocks(blocks_NGX: Tensor, kind: str) -> Tensor:
    factors, quants_NGX = _parts(blocks_NGX, kind)
    scales_NG1, *offsets_NG1 = factors.float().split(1, 2)
    if BITS[kind] == 8:
        quants_NGX = quants_NGX.view(torch.int8)
    weight_NGQ = quants_NGX.float().sub_(8 * (kind == "Q4_0")).mul_(scales_NG1)
    return sum(offsets_NG1, weight_NGQ).flatten(1)


def _repack_blocks(blocks_NGX: Tensor, kind: str) -> Tensor:
    factors, quants_NGX = _parts(blocks_NGX, kind)
    scales_NG = factors[..., 0]
    if BITS[kind] == 8:
        return pack(quants_NGX, scales_NG)
    offsets_NG = factors[..., 1] if kind == "Q4_1" else -8 * scales_NG
    return pack(quants_NGX, scales_NG, offsets_NG)


def _parts(blocks_NGX: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Scale, and offset if there is one, of each block; and its q, a byte each."""
    begin = 4 if kind == "Q4_1" else 2
    factors, quants_NGX = blocks_NGX[..., :begin].contiguous(), blocks_NGX[..., begin:]
    if BITS[kind] == 4:
        quants_NGX = torch.cat((quants_NGX & 15, quants_NGX >> 4), 2)
    return factors.view(torch.float16), quants_NGX
