"""Products of a few rows with a matrix of 4 or 8 bits: the linear layers of `quantized_copies.py`.

A program computes some columns of the output. W is split along E among its warps: each reads one of
every `SHARES` groups, and converts it in registers, once. Their sums are added in a fixed order:
among blocks of at most 8 rows, and among longer ones, a row's bits do not depend on the others. W
is the first factor of every product, as a tensor core takes 16 rows of the first factor and 8
columns of the second.
Legend: M rows, N outputs, E inputs, G groups, S shares, R rows, C columns and X bytes of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitri.core.roofline import GROUP
from minitri.devices.gpu.kernels.flash_decoding import num_processors

COLUMNS = 32  # outputs of a program


@triton.jit  # type: ignore[untyped-decorator]
def nibbles(bytes_SCX, like: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low and the high nibble of each byte, both less 8, as two tensors of type `like`.
    In bfloat16 of four bytes at a time: 0x4300 plus a nibble is 128 to 143; 136 is subtracted."""
    if like == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, high, one, less;
            mov.b32 one, 0x3F803F80;
            mov.b32 less, 0xC308C308;
            shr.u32 high, $4, 4;
            prmt.b32 a, $4, 0x43434343, 0x4140;
            and.b32 a, a, 0xFF0FFF0F;
            fma.rn.bf16x2 $0, a, one, less;
            prmt.b32 a, $4, 0x43434343, 0x4342;
            and.b32 a, a, 0xFF0FFF0F;
            fma.rn.bf16x2 $1, a, one, less;
            prmt.b32 a, high, 0x43434343, 0x4140;
            and.b32 a, a, 0xFF0FFF0F;
            fma.rn.bf16x2 $2, a, one, less;
            prmt.b32 a, high, 0x43434343, 0x4342;
            and.b32 a, a, 0xFF0FFF0F;
            fma.rn.bf16x2 $3, a, one, less;
            }""",
            "=r,=r,=r,=r,r",
            [bytes_SCX],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return ((bytes_SCX & 15) - 8).to(like), (((bytes_SCX >> 4) & 15) - 8).to(like)


@triton.jit(do_not_specialize=["M", "G"])  # type: ignore[untyped-decorator]
def multiply_tile(  # type: ignore[no-untyped-def]
    x,
    weight,
    scales,
    out,
    M,
    N,
    G,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARES: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Triton kernel: a tile (ROWS, COLUMNS) of out (M, N) = x (M, E) W^T, summed in float32. W has
    4 or 8 BITS and scales (G, N), one per GROUP of E; SHARES warps divide the groups."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    WIDTH: tl.constexpr = GROUP * BITS // 8
    shares = tl.arange(0, SHARES)[:, None, None]
    places = tl.arange(0, WIDTH)
    is_row = (rows < M)[None, None, :]
    is_column = (columns < N)[None, :, None]
    in_x = rows[None, None, :].to(tl.int64) * (G * GROUP) + places[None, :, None]
    from_x = x + in_x + shares * GROUP
    in_weight = columns[None, :, None].to(tl.int64) * (G * WIDTH) + places[None, None, :]
    from_weight = weight + in_weight + shares * WIDTH
    from_scales = scales + columns[None, :, None] + shares * N
    out_SCR = tl.zeros([SHARES, COLUMNS, ROWS], tl.float32)
    for group in tl.range(0, G, SHARES, num_stages=STAGES):
        is_there = shares < G - group
        bytes_SCX = tl.load(from_weight + group * WIDTH, mask=is_there & is_column, other=0)
        scale_SC1 = tl.load(from_scales + group * N, mask=is_there & is_column, other=0.0)
        x_SXR = tl.load(from_x + group * GROUP, mask=is_there & is_row, other=0.0)
        if BITS == 4:
            low_SCX, high_SCX = nibbles(bytes_SCX, x_SXR.dtype)
            part_SCR = tl.dot(low_SCX, x_SXR, input_precision="ieee")
            x_SXR = tl.load(from_x + group * GROUP + WIDTH, mask=is_there & is_row, other=0.0)
            part_SCR = tl.dot(high_SCX, x_SXR, part_SCR, input_precision="ieee")
        else:
            part_SCR = tl.dot(bytes_SCX.to(x_SXR.dtype), x_SXR, input_precision="ieee")
        out_SCR += part_SCR * scale_SC1
    out_CR = tl.sum(out_SCR, 0)
    place = rows[None, :].to(tl.int64) * N + columns[:, None]
    is_ours = (rows < M)[None, :] & (columns < N)[:, None]
    tl.store(out + place, out_CR.to(out.dtype.element_ty), mask=is_ours)


def tile_sizes(M: int, bits: int, *, is_narrow: bool) -> dict[str, int]:
    """Keywords of `multiply_tile` for M rows and weights of 4 or 8 bits: tile sizes, launch option.
    `is_narrow`: no multiprocessor has two programs, so that one needs more warps to convert 4 bits.
    At most 99 KiB of shared memory, which GPUs from compute capability 8.0 on have."""
    rows = 8 if M <= 8 else 16
    shares = 16 if is_narrow and bits == 4 else 8
    stages = 3 if (rows, shares) == (8, 8) else 2
    tile = {"ROWS": rows, "COLUMNS": COLUMNS, "SHARES": shares, "GROUP": GROUP}
    return {**tile, "BITS": bits, "STAGES": stages, "num_warps": shares}


def multiply(x: Tensor, weight_NX: Tensor, scales_GN: Tensor) -> Tensor:
    """x W^T (..., N), with W as `quantize` gives it; on a GPU float32 x is rounded to bfloat16."""
    G, N = scales_GN.shape
    x_ME = x.reshape(-1, x.shape[-1]).contiguous()
    if missing := G * GROUP - x.shape[-1]:
        x_ME = torch.nn.functional.pad(x_ME, (0, missing))
    if x_ME.is_cuda and x.dtype == torch.float32:
        x_ME = x_ME.bfloat16()
    M = len(x_ME)
    out_MN = x.new_empty(M, N)
    num_tiles = triton.cdiv(N, COLUMNS)
    is_narrow = num_tiles <= num_processors(x.device)
    sizes = tile_sizes(M, 8 * weight_NX.shape[1] // (G * GROUP), is_narrow=is_narrow)
    grid = triton.cdiv(M, sizes["ROWS"]), num_tiles
    with torch.cuda.device_of(x):  # else Triton would launch on the current GPU
        multiply_tile[grid](x_ME, weight_NX, scales_GN, out_MN, M, N, G, **sizes)
    return out_MN.view(*x.shape[:-1], N)
