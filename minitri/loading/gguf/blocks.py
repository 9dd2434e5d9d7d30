"""Quantized matrices of a GGUF file, repacked for the CPU kernels (layout: `cpu/quantized.py`).

A row is a chain of blocks. One of 32 weights holds their scale d, in Q4_1 and Q5_1 their offset m,
both float16, in 5 bits the highest bit of each q, and the q: in less than 8 bits, 16 bytes whose
low halves are the first 16 of them and whose high halves are the others. A weight is d (q - 8) in
Q4_0, d (q - 16) in Q5_0, d q + m in Q4_1 and Q5_1, and d q in Q8_0. K-quants have blocks of 256. No
number changes on the way: 8 d has the digits of d.

Legend: N rows, G blocks of a row, X bytes of a block.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minitri.cpu.quantized import GROUP, Form, pack, rows_at_once, split_bits

if TYPE_CHECKING:
    from minitri.loading.gguf.container import StoredTensor

FORMS = {"Q4_0": Form.Q4, "Q4_1": Form.Q4, "Q5_0": Form.Q5, "Q5_1": Form.Q5, "Q8_0": Form.Q8}
FORMS |= {form.name: form for form in (Form.Q4_K, Form.Q5_K, Form.Q6_K)}
"""Types that the kernels can read, and what they become."""


def repack(stored: "StoredTensor", place_NX: Tensor, order_N: Tensor | None = None) -> None:
    """Puts a matrix where the kernels are to read it, its n-th row at the `order_N[n]`-th or n-th
    place."""
    kind = stored.type.name
    form = FORMS[kind]
    num_columns = stored.shape[1]
    num_rows = rows_at_once(num_columns)
    for i, blocks_NGX in enumerate(_blocks(stored, 256 if form.is_nested else GROUP)):
        if form == Form.Q6_K:
            parts = _parts_of_6_bits(blocks_NGX)
        elif form.is_nested:
            parts = _parts_with_minima(blocks_NGX)
        else:
            quants_NGQ, *factors_NG = _numbers(kind, blocks_NGX)
            if form != Form.Q8 and len(factors_NG) == 1:
                factors_NG.append(-(1 << form.bits - 1) * factors_NG[0])
            parts = [*split_bits(quants_NGQ, form.bits), *factors_NG]
        some = slice(i * num_rows, (i + 1) * num_rows)
        if order_N is None:
            pack(form, num_columns, *parts, out=place_NX[some])
        else:
            place_NX[order_N[some]] = pack(form, num_columns, *parts)


def keeps_zeros(stored: "StoredTensor") -> bool:
    """Whether what the kernels dequantize are the bits that the `gguf` package gives: in a matrix
    but for Q4_0 and Q5_0, where zeros lose their signs, on which the weights' checksum depends."""
    return len(stored.shape) == 2 and stored.type.name not in ("Q4_0", "Q5_0")


def _blocks(stored: "StoredTensor", num_weights: int) -> Iterator[Tensor]:
    """Blocks of so many weights, of some rows at a time."""
    num_blocks = stored.shape[1] // num_weights
    num_rows = rows_at_once(stored.shape[1])
    for begin in range(0, stored.shape[0], num_rows):
        rows = stored.data[begin : begin + num_rows].copy()  # the file is mapped for reading only
        yield torch.from_numpy(rows).unflatten(1, (num_blocks, -1))
        stored.release()


def _numbers(kind: str, blocks_NGX: Tensor) -> list[Tensor]:
    """Of blocks of 32 weights q, the scale, and the offset if there is one."""
    sizes = [4 if kind.endswith("_1") else 2, 4 * (FORMS[kind] == Form.Q5)]
    sizes.append(blocks_NGX.shape[2] - sum(sizes))
    factors, high, quants_NGQ = blocks_NGX.split(sizes, 2)
    if FORMS[kind] == Form.Q8:
        quants_NGQ = quants_NGQ.view(torch.int8)
    else:
        quants_NGQ = torch.cat((quants_NGQ & 15, quants_NGQ >> 4), 2)
    if high.numel():
        bits = high[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
        quants_NGQ = quants_NGQ | bits.flatten(2) << 4
    return [quants_NGQ, *factors.contiguous().view(torch.float16).unbind(2)]


def _parts_with_minima(blocks_NGX: Tensor) -> list[Tensor]:
    """Of Q4_K and Q5_K: bits of q lie as the kernels want them; scales and minima, 8 of each, have
    four bits of the latter ones apart from two others."""
    sizes = [2, 2, 12, blocks_NGX.shape[2] - 16 - 128, 128]
    unit, subtracted, scales, high, low = blocks_NGX.split(sizes, 2)
    units = [unit, subtracted ^ torch.tensor([0, 128], dtype=torch.uint8)]  # its sign bit
    first, second, both = scales.unflatten(2, (3, 4)).unbind(2)
    scales = torch.cat((first & 63, both & 15 | first >> 2 & 48), 2)
    minima = torch.cat((second & 63, both >> 4 | second >> 2 & 48), 2)
    return [low, high, *units, scales, minima]


def _parts_of_6_bits(blocks_NGX: Tensor) -> list[Tensor]:
    """Of Q6_K: in each half of a block groups 0 and 2, 1 and 3 share bytes, here 0 and 1, 2 and 3;
    their higher bits lie as the kernels want them."""
    low, high, scales, units = blocks_NGX.split([128, 64, 16, 2], 2)
    even, odd = low.unflatten(2, (2, 2, 32)).unbind(3)
    low = torch.stack((even & 15 | odd << 4, even >> 4 | odd & 240), 3)
    return [low, high, units, scales]
