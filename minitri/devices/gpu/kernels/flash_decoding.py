"""Attention of a short block in one pass over K and V: the `triton` backend.

Every byte of the KV cache should be read once, by all multiprocessors (FlashDecoding). The query
heads of a KV head and the tokens of the block are rows of one tile. Prefix and block are cut in
pieces, one for each program; a second kernel merges their results. D is rounded up to a power of
two. With `TRITON_INTERPRET=1` the same code runs on a CPU, which is how tests check it.
Legend: B batch, S slots, K KV heads, H heads, G = H / K, D head dim, T tokens, R = G T, P pieces.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_KEYS = 64  # keys that a program reads at a time
MAX_ROWS = 64  # rows of queries per program; another program with more rows reads K and V again
MAX_PIECES = 128  # pieces of a prefix, each for one program
MIN_PIECES = 8  # least pieces of a row in a batch, as one row may be much longer than the others
PROGRAMS_PER_PROCESSOR = 2  # programs for which a multiprocessor has shared memory at a time

# Arguments that vary from call to call: Triton must not compile a kernel for each value.
RUNTIME = ["T", "G", "num_kv_heads", "num_pieces"]


@triton.jit(do_not_specialize=RUNTIME)  # type: ignore[untyped-decorator]
def attend_piece(  # type: ignore[no-untyped-def]
    q, keys, values, lengths, block_mask, outs, lses, scale, T, G, num_kv_heads, num_pieces,
    q_b, q_t, q_h, kv_b, kv_h, kv_s, ROWS: tl.constexpr, NUM_KEYS: tl.constexpr,
    HEAD: tl.constexpr, D: tl.constexpr, HAS_MASK: tl.constexpr,
) -> None:  # fmt: skip
    """Triton kernel: attention of the queries of one KV head to one of `num_pieces` pieces of keys.
    Writes results to `outs`, and log-sum-exps of scores, for `merge_pieces`, to `lses`.
    A running softmax: sums are scaled down at each larger score. `scale` has a factor of log2(e),
    logarithms are to base 2. HEAD: head dim, D: its next power of two; q_b to kv_s: strides."""
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    b, k = head // num_kv_heads, head % num_kv_heads
    length = tl.load(lengths + b).to(tl.int32)
    end = length + T
    share = tl.cdiv(tl.cdiv(end, NUM_KEYS), num_pieces) * NUM_KEYS
    first = piece * share
    last = tl.minimum(first + share, end)

    rows = tile * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    is_dim = (dims < HEAD)[None, :]
    t = rows % T
    is_row = rows < G * T
    from_q = q + b * q_b + t * q_t + (k * G + rows // T) * q_h
    tile_RD = tl.load(from_q[:, None] + dims[None, :], mask=is_row[:, None] & is_dim, other=0.0)
    most = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out_RD = tl.zeros([ROWS, D], tl.float32)
    for start in range(first, last, NUM_KEYS):
        slots = start + tl.arange(0, NUM_KEYS)
        far = slots.to(tl.int64)[:, None] * kv_s  # 2^18 slots of 2^13 numbers exceed 32 bits
        places = b * kv_b + k * kv_h + far + dims[None, :]
        is_there = slots < last
        keys_SD = tl.load(keys + places, mask=is_there[:, None] & is_dim, other=0.0)
        scores_RS = tl.dot(tile_RD, tl.trans(keys_SD), input_precision="ieee") * scale
        if HAS_MASK:
            is_block = (slots >= length) & is_there
            from_mask = block_mask + t[:, None] * T + (slots - length)[None, :]
            sees = tl.load(from_mask, mask=is_block[None, :], other=0) != 0
            sees = sees | (slots < length)[None, :]
        else:
            sees = slots[None, :] <= length + t[:, None]
        scores_RS = tl.where(sees, scores_RS, -float("inf"))
        new_most = tl.maximum(most, tl.max(scores_RS, 1))
        base = tl.where(new_most == -float("inf"), 0.0, new_most)  # -inf: no key was seen yet
        probs_RS = tl.exp2(scores_RS - base[:, None])
        decay = tl.exp2(most - base)
        total = total * decay + tl.sum(probs_RS, 1)
        values_SD = tl.load(values + places, mask=is_there[:, None] & is_dim, other=0.0)
        probs_RS = probs_RS.to(values_SD.dtype)
        out_RD = out_RD * decay[:, None] + tl.dot(probs_RS, values_SD, input_precision="ieee")
        most = new_most
    total = tl.maximum(total, 1.0)  # only a row that sees no key has less: 0
    out_RD = out_RD / total[:, None]
    lse = most + tl.log2(total)
    place = (head * num_pieces + piece) * G * T + rows
    tl.store(outs + place[:, None] * D + dims[None, :], out_RD, mask=is_row[:, None])
    tl.store(lses + place, lse, mask=is_row)


@triton.jit(do_not_specialize=RUNTIME)  # type: ignore[untyped-decorator]
def merge_pieces(  # type: ignore[no-untyped-def]
    outs, lses, out, T, G, num_kv_heads, num_pieces, PIECES: tl.constexpr, D: tl.constexpr
) -> None:
    """Triton kernel: merges the results `outs` of all pieces by log-sum-exps `lses` into `out`."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    b, k = head // num_kv_heads, head % num_kv_heads
    pieces = tl.arange(0, PIECES)
    dims = tl.arange(0, D)
    is_piece = pieces < num_pieces
    places = (head * num_pieces + pieces) * G * T + row
    lse = tl.load(lses + places, mask=is_piece, other=-float("inf"))
    shares = tl.exp2(lse - tl.max(lse, 0))
    from_outs = outs + places[:, None] * D + dims[None, :]
    pieces_PD = tl.load(from_outs, mask=is_piece[:, None], other=0.0)
    merged_D = tl.sum(pieces_PD * shares[:, None], 0) / tl.sum(shares, 0)
    place = (b * T + row % T) * num_kv_heads * G + k * G + row // T
    tl.store(out + place * D + dims, merged_D)


def tile_sizes(num_rows: int, dtype: torch.dtype, *, has_mask: bool) -> dict[str, int]:
    """Keywords of `attend_piece` for `num_rows` rows of queries: tile sizes for all supported GPUs.
    Registers suffice, in float32 and with masks, too, as does shared memory of 99 KiB."""
    is_wide = dtype == torch.float32
    most = MAX_ROWS // 2 if is_wide or has_mask else MAX_ROWS
    rows = min(most, max(16, triton.next_power_of_2(num_rows)))
    keys = NUM_KEYS // 4 if is_wide else NUM_KEYS
    warps = 8 if is_wide or has_mask or rows == 32 else 4
    return {"ROWS": rows, "NUM_KEYS": keys, "num_warps": warps}


@cache
def num_processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 4 for a CPU, where kernels are interpreted."""
    if device.type == "cpu":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend_short_block(
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    lengths_B: Tensor,
    mask_TT: Tensor | None = None,
) -> Tensor:
    """The `triton` backend: attention (B, T, H, D) of row b's queries to its first `lengths_B[b]`
    slots and, of the T after them, those in `mask_TT` (None: causal)."""
    B, T, H, head_dim = q_BTHD.shape
    D = triton.next_power_of_2(head_dim)
    K = keys_BKSD.shape[1]
    R = H // K * T
    assert keys_BKSD.stride() == values_BKSD.stride()
    has_mask = mask_TT is not None
    # Without a mask any address will do: it is not read.
    block_mask = lengths_B if mask_TT is None else mask_TT.contiguous()
    sizes = tile_sizes(R, q_BTHD.dtype, has_mask=has_mask)
    num_tiles = triton.cdiv(R, sizes["ROWS"])
    wanted = PROGRAMS_PER_PROCESSOR * num_processors(q_BTHD.device) // (B * K * num_tiles)
    P = min(MAX_PIECES, max(1 if B == 1 else MIN_PIECES, wanted))
    outs = q_BTHD.new_empty(B, K, P, R, D, dtype=torch.float32)
    lses = q_BTHD.new_empty(B, K, P, R, dtype=torch.float32)
    out_BTHD = q_BTHD.new_empty(B, T, H, D)
    scale = math.log2(math.e) / math.sqrt(head_dim)
    tensors = (q_BTHD, keys_BKSD, values_BKSD, lengths_B, block_mask, outs, lses)
    counts = (T, H // K, K, P)
    strides = (*q_BTHD.stride()[:3], *keys_BKSD.stride()[:3])
    with torch.cuda.device_of(q_BTHD):  # else Triton would launch on the current GPU
        attend_piece[num_tiles, P, B * K](
            *tensors, scale, *counts, *strides, HEAD=head_dim, D=D, HAS_MASK=has_mask, **sizes
        )
        merge_pieces[B * K, R](outs, lses, out_BTHD, *counts, PIECES=triton.next_power_of_2(P), D=D)
    return out_BTHD[..., :head_dim]
