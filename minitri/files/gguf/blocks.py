"""Quantized blocks of a GGUF file: repacked for the CPU kernels, or dequantized.

A row of a matrix is a chain of blocks. A block of 32 weights holds their scale d and, in Q4_1 and
Q5_1, their offset m, both float16; with 5 bits, the highest bit of each quantized number q; then
the q. Those of less than 8 bits are in 16 bytes: the first 16 q in the low halves of the bytes, the
others in the high halves. A weight is d (q - 8) in Q4_0, d (q - 16) in Q5_0, d q + m in Q4_1 and
Q5_1, and d q in Q8_0. K-quants have blocks of 256. Repacking is exact: 8 d has the digits of d.

Legend: N rows, G blocks of a row, X bytes of a block, Q weights of a block.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minitri.devices.cpu.kernels import Kernels
from minitri.devices.cpu.quantized import GROUP, Form, pack, packed_shape, rows_at_once

if TYPE_CHECKING:
    from minitri.files.gguf.container import StoredTensor

FORMS = {"Q4_0": Form.Q4, "Q4_1": Form.Q4, "Q5_0": Form.Q5, "Q5_1": Form.Q5, "Q8_0": Form.Q8}
FORMS |= {form.name: form for form in (Form.Q4_K, Form.Q5_K, Form.Q6_K)}
"""Types of GGUF that the CPU kernels can read, by name, with the kernels' `Form` of each."""


def repack(stored: "StoredTensor", place_NX: Tensor, rows_N: Tensor | None = None) -> None:
    """Writes a stored matrix in the kernels' layout (`devices/cpu/quantized.py`) into a uint8
    tensor; row n is the file's row `rows_N[n]`, or row n without `rows_N`."""
    kind = stored.type.name
    blocks = _blocks(stored, 256 if FORMS[kind].is_nested else GROUP, rows_N)
    parts = place_NX.split(rows_at_once(stored.shape[1]))
    for blocks_NGX, place in zip(blocks, parts, strict=True):
        place.copy_(pack(FORMS[kind], *_numbers(kind, blocks_NGX)))


def dequantize(stored: "StoredTensor", kernels: Kernels | None) -> Tensor:
    """Dequantizes a stored tensor to float32 (integers stay integers), faster with kernels."""
    import gguf

    form = FORMS.get(stored.type.name)
    if kernels is None or form is None or not is_exact(stored):
        values = gguf.dequantize(stored.data, stored.type)
        return torch.from_numpy(np.require(values, requirements="W"))  # no view of the file
    N, E = stored.shape
    packed_NX = torch.empty(packed_shape(N, E, form), dtype=torch.uint8)
    repack(stored, packed_NX)
    return kernels.dequantize(packed_NX, E, form, torch.float32)[:N]


def is_exact(stored: "StoredTensor") -> bool:
    """Whether kernels dequantize a stored tensor to the same bits as the `gguf` package, on which
    the checksum of weights depends: matrices, except that Q4_0 and Q5_0 lose signs of zeros."""
    return len(stored.shape) == 2 and stored.type.name not in ("Q4_0", "Q5_0")


def _blocks(stored: "StoredTensor", num_weights: int, rows_N: Tensor | None) -> Iterator[Tensor]:
    """Yields blocks (N, G, X) of `num_weights` weights of a stored matrix, a few rows at a time."""
    num_rows = rows_at_once(stored.shape[1])
    for begin in range(0, stored.shape[0], num_rows):
        part = slice(begin, begin + num_rows)
        # Copied, since the file is mapped for reading only.
        rows = stored.data[part].copy() if rows_N is None else stored.data[rows_N[part].numpy()]
        yield torch.from_numpy(rows).unflatten(1, (stored.shape[1] // num_weights, -1))
        stored.release()


def _numbers(kind: str, blocks_NGX: Tensor) -> list[Tensor]:
    """The numbers q (N, G, 32) of blocks, and the factors that `pack` takes."""
    form = FORMS[kind]
    if form == Form.Q6_K:
        return _of_6_bits(blocks_NGX)
    if form.is_nested:
        return _with_minima(blocks_NGX)
    sizes = [4 if kind.endswith("_1") else 2, 4 * (form == Form.Q5)]
    sizes.append(blocks_NGX.shape[2] - sum(sizes))
    halves, high, quants_NGQ = blocks_NGX.split(sizes, 2)
    factors_NG = [*halves.contiguous().view(torch.float16).unbind(2)]
    if form != Form.Q8:
        quants_NGQ = torch.cat((quants_NGQ & 15, quants_NGQ >> 4), 2)
        if len(factors_NG) == 1:
            factors_NG.append(-(1 << form.bits - 1) * factors_NG[0])
    if high.numel():
        quants_NGQ = quants_NGQ | _spread(high, 1, -1).flatten(2) << 4
    return [quants_NGQ, *factors_NG]


def _spread(bytes_X: Tensor, num_bits: int, dim: int) -> Tensor:
    """Splits bytes into parts of `num_bits` bits, the lowest first, along a new dimension `dim`."""
    mask = (1 << num_bits) - 1
    return torch.stack([bytes_X >> place & mask for place in range(0, 8, num_bits)], dim)


def _with_minima(blocks_NGX: Tensor) -> list[Tensor]:
    """Numbers and factors, as of `_numbers`, of blocks in Q4_K or Q5_K. A byte holds q of two
    successive groups, or the fifth bits of eight q. There are 8 scales and 8 minima of 6 bits; of
    the last 4 of each, 4 bits are in one byte and 2 in another."""
    sizes = [2, 2, 12, blocks_NGX.shape[2] - 16 - 128, 128]
    unit, subtracted, scales, high, low = blocks_NGX.split(sizes, 2)
    units = [unit, subtracted ^ torch.tensor([0, 128], dtype=torch.uint8)]  # flips the sign
    first, second, both = scales.unflatten(2, (3, 4)).unbind(2)
    scales = torch.cat((first & 63, both & 15 | first >> 2 & 48), 2)
    minima = torch.cat((second & 63, both >> 4 | second >> 2 & 48), 2)
    quants = _spread(low.unflatten(2, (4, 32)), 4, 3).flatten(2, 3)
    if high.numel():
        quants |= _spread(high, 1, 2) << 4
    return [quants.flatten(1, 2), *map(_halves, units), scales.flatten(1), minima.flatten(1)]


def _of_6_bits(blocks_NGX: Tensor) -> list[Tensor]:
    """Numbers and factors, as of `_numbers`, of blocks in Q6_K. In each half of a block a byte
    holds low bits of groups 0 and 2, or of 1 and 3, or the 2 high bits of all four."""
    low, high, scales, units = blocks_NGX.split([128, 64, 16, 2], 2)
    four = _spread(low.unflatten(2, (2, 2, 32)), 4, 3).flatten(3, 4)
    others = _spread(high.unflatten(2, (2, 32)), 2, 3)
    return [(four | others << 4).flatten(1, 3), _halves(units), scales.flatten(1)]


def _halves(bytes_NGX: Tensor) -> Tensor:
    """Reads bytes as float16 numbers (N, G), two bytes each."""
    return bytes_NGX.contiguous().view(torch.float16).flatten(1)
