"""Products of a few rows with a matrix of 8 bits: what the linear layers of `eight_bits.py` run.

A pass of decoding reads every weight for a few rows, so bytes count, and all multiprocessors should
read at once. A program computes some columns of the output. Its warps share their rows of W: each
reads another run of every `SHARES` and converts it in registers, so that no number is converted
twice and many reads are under way. Nothing is added across programs: the same bits come every time.

Programs for one tile of rows on 132 multiprocessors: 256 of 16 columns for 4096 x 4096 and for 4096
x 11008 (two at a time on each), 384 of 32 columns for 12288 x 4096, 688 for 22016 x 4096.

Legend: M rows, N out_features, E in_features, G shares, R rows, C columns and X numbers of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitri.gpu.kernels import num_processors

SHARES = 4
"""Runs of a row of W that a program reads at once: one for each of its warps."""
MAX_ROWS = 64
"""Rows per program; for further ones W is read again."""


@triton.jit(do_not_specialize=["M"])  # type: ignore[untyped-decorator]
def multiply_tile(  # type: ignore[no-untyped-def]
    x,
    weight,
    scales,
    out,
    M,
    N,
    E,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARES: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """(ROWS, COLUMNS) of scales * x W^T, added up in float32; all tensors are contiguous."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    places = tl.arange(0, SHARES)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    is_row, is_column = rows < M, columns < N
    from_x = x + rows[None, :, None].to(tl.int64) * E + places
    from_weight = weight + columns[None, :, None].to(tl.int64) * E + places
    out_GRC = tl.zeros([SHARES, ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, E, SHARES * WIDTH, num_stages=STAGES):
        is_there = places < E - start
        x_GRX = tl.load(from_x + start, mask=is_row[None, :, None] & is_there, other=0.0)
        is_weight = is_column[None, :, None] & is_there
        weight_GCX = tl.load(from_weight + start, mask=is_weight, other=0.0).to(x_GRX.dtype)
        weight_GXC = tl.permute(weight_GCX, (0, 2, 1))
        out_GRC = tl.dot(x_GRX, weight_GXC, out_GRC, input_precision="ieee")
    scale_C = tl.load(scales + columns, mask=is_column, other=0.0)
    out_RC = tl.sum(out_GRC, 0) * scale_C[None, :]
    place = rows[:, None].to(tl.int64) * N + columns[None, :]
    is_ours = is_row[:, None] & is_column[None, :]
    tl.store(out + place, out_RC.to(out.dtype.element_ty), mask=is_ours)


def tile_sizes(M: int, N: int, num_processors: int) -> dict[str, int]:
    """The tile that a program computes, and how it reads.

    Few columns where programs would be too few otherwise. All stages take 80 KiB of shared memory
    at most, which every GPU from compute capability 8.0 on has.
    """
    rows = min(MAX_ROWS, max(16, triton.next_power_of_2(M)))
    is_narrow = rows == 16 and triton.cdiv(N, 32) < 2 * num_processors
    columns, width = (16, 128) if is_narrow else (32, 64)
    stages = 3 if rows == MAX_ROWS else 4
    return {"ROWS": rows, "COLUMNS": columns, "WIDTH": width, "STAGES": stages}


def multiply(x: Tensor, weight_NE: Tensor, scales_N: Tensor) -> Tensor:
    """scales * x W^T, (..., N), for (..., E); W is int8.

    On a GPU float32 rows are rounded to bfloat16 before.
    """
    N, E = weight_NE.shape
    x_ME = x.reshape(-1, E).contiguous()
    if x_ME.is_cuda and x.dtype == torch.float32:
        x_ME = x_ME.bfloat16()
    out_MN = x.new_empty(len(x_ME), N)
    sizes = tile_sizes(len(x_ME), N, num_processors(x.device))
    grid = triton.cdiv(N, sizes["COLUMNS"]), triton.cdiv(len(x_ME), sizes["ROWS"])
    tensors = (x_ME, weight_NE, scales_N, out_MN)
    with torch.cuda.device_of(x):  # else Triton would launch on the current one
        multiply_tile[grid](*tensors, len(x_ME), N, E, SHARES=SHARES, **sizes, num_warps=SHARES)
    return out_MN.view(*x.shape[:-1], N)
