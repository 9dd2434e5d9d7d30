"""Quantized matrices of a GGUF file, as plain numbers or repacked for the CPU kernels (layout:
`cpu/quantized.py`).

A row is a chain of blocks of 32 weights. A block holds their scale d, in Q4_1 their offset m, both
float16, and their q: in 4 bits, 16 bytes whose low halves are the first 16 of them and whose high
halves are the others. A weight is d (q - 8) in Q4_0, d q + m in Q4_1, and d q in Q8_0. No number
changes on the way: 8 d has the digits of d.

Legend: N rows, G blocks of a row, X bytes of a block.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minitri.cpu.quantized import GROUP, pack, rows_at_once

if TYPE_CHECKING:
    from minitri.loading.gguf.container import StoredTensor

BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""Types that the kernels can read, and the bits of their q."""


def unpack(stored: "StoredTensor") -> Tensor:
    """A matrix in float32: the bits that the `gguf` package gives it, in less than half the time on
    two cores."""
    weight_NE = torch.empty(stored.shape)
    parts = weight_NE.split(rows_at_once(stored.shape[1]))
    for part_NE, blocks in zip(parts, _blocks(stored), strict=True):
        quants_NGQ, scales_NG, *offsets_NG = blocks
        place_NGQ = part_NE.unflatten(1, (-1, GROUP)).copy_(quants_NGQ)
        if stored.type.name == "Q4_0":
            place_NGQ.sub_(8)
        place_NGQ.mul_(scales_NG[..., None].float())
        if offsets_NG:
            place_NGQ.add_(offsets_NG[0][..., None].float())
    return weight_NE


def repack(stored: "StoredTensor") -> Tensor:
    """A matrix in the layout of the kernels."""
    packed = []
    for quants_NGQ, *factors_NG in _blocks(stored):
        if stored.type.name == "Q4_0":
            factors_NG.append(-8 * factors_NG[0])
        packed.append(pack(quants_NGQ, *factors_NG))
    return torch.cat(packed)


def _blocks(stored: "StoredTensor") -> Iterator[list[Tensor]]:
    """Some rows at a time: q of each block, its scale, and its offset if it has one."""
    kind = stored.type.name
    num_columns = stored.shape[1]
    begin = 4 if kind == "Q4_1" else 2
    stored_NX = torch.from_numpy(stored.data.copy())  # the file is mapped for reading only
    for part_NX in stored_NX.split(rows_at_once(num_columns)):
        blocks_NGX = part_NX.unflatten(1, (num_columns // GROUP, -1))
        factors = blocks_NGX[..., :begin].contiguous().view(torch.float16)
        quants_NGX = blocks_NGX[..., begin:]
        if BITS[kind] == 4:
            quants_NGX = torch.cat((quants_NGX & 15, quants_NGX >> 4), 2)
        else:
            quants_NGX = quants_NGX.view(torch.int8)
        yield [quants_NGX, *factors.unbind(2)]
