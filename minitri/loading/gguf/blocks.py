"""Quantized matrices of a GGUF file, repacked for the CPU kernels (layout: `cpu/quantized.py`).

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


def repack(rows: np.ndarray, kind: str, num_columns: int) -> Tensor:
    """A matrix as it is stored, (N, bytes of a row), in the layout of the kernels."""
    stored_NX = torch.from_numpy(rows.copy())  # the file is mapped for reading only
    blocks_NGX = stored_NX.unflatten(1, (num_columns // GROUP, -1))
    parts = blocks_NGX.split(rows_at_once(num_columns))
    return torch.cat([_repack_blocks(part_NGX, kind) for part_NGX in parts])


def _repack_blocks(blocks_NGX: Tensor, kind: str) -> Tensor:
    begin = 4 if kind == "Q4_1" else 2
    factors = blocks_NGX[..., :begin].contiguous().view(torch.float16)
    scales_NG, quants_NGX = factors[..., 0], blocks_NGX[..., begin:]
    if BITS[kind] == 8:
        return pack(quants_NGX, scales_NG)
    offsets_NG = factors[..., 1] if kind == "Q4_1" else -8 * scales_NG
    return pack(torch.cat((quants_NGX & 15, quants_NGX >> 4), 2), scales_NG, offsets_NG)
