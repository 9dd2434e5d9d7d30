"""Matrix products of many rows, as of prompts: by a compiled kernel, or in bfloat16 by PyTorch.

Legend: R rows, E in_features, N out_features.
"""

from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.core.settings import LONGEST_BLOCK

TILE = 256  # rows of each product where the number of rows would change last bits


def multiply_rows(rows_RE: Tensor, weight_NE: Tensor, bias_N: Tensor | None) -> Tensor:
    """Linear layer x W^T + b, (R, N), by PyTorch, such that a row's bits do not depend on others.
    For processors that multiply bfloat16, which PyTorch does fastest."""
    R = len(rows_RE)
    tile = product_tile(weight_NE.dtype, *weight_NE.shape, torch.get_num_threads())
    tile = tile or max(R, LONGEST_BLOCK + 1)
    if R % tile:
        rows_RE = F.pad(rows_RE, (0, 0, 0, -R % tile))
    multiply = torch.mm if bias_N is None else partial(torch.addmm, bias_N)
    out_RN = rows_RE.new_empty(len(rows_RE), len(weight_NE))
    for part, out in zip(rows_RE.split(tile), out_RN.split(tile), strict=True):
        multiply(part, weight_NE.t(), out=out)
    return out_RN[:R]


@lru_cache
def product_tile(dtype: torch.dtype, N: int, E: int, num_threads: int) -> int | None:  # noqa: ARG001 (a key)
    """How many rows to multiply with a (N, E) matrix at a time, for row-invariant products.
    None: any number above LONGEST_BLOCK. With AMX oneDNN may sum few rows in another order; then K
    and V would depend on the chunks of a prompt. So the order is tested here."""
    seeded = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, E, generator=seeded, dtype=dtype) for n in (4 * TILE, N))
    many = F.linear(x, weight)
    few = (LONGEST_BLOCK + 1, TILE, 2 * TILE)
    is_same = all(torch.equal(F.linear(x[:rows], weight), many[:rows]) for rows in few)
    return None if is_same else TILE
