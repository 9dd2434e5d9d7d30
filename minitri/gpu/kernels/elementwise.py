"""Elementwise work of a transformer block, fused: what `fused_modules.py` runs between matrices.

Each kernel reads what the one before it has written once, computes in float32, and rounds once, to
the model's number type, wherever it stores; the sum of a residual addition is rounded before the
norm reads it, as where it is stored. A row depends on no other.

Legend: B batch, S slots, K KV heads, H query heads, D head dim, T new tokens, X = (H + 2 K) D,
E hidden size, I inner size of the MLP, W tokens that a buffer of queries holds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import RMSNorm

from minitri.model.rope import Rotary

HEADS_PER_PROGRAM = 8
GATES_PER_PROGRAM = 1024


@triton.jit(do_not_specialize=["T", "W"])  # type: ignore[untyped-decorator]
def rotate_and_write(  # type: ignore[no-untyped-def]
    qkv,
    cos,
    signed_sin,
    slots,
    q,
    keys,
    values,
    raw_keys,
    queries,
    T,
    S,
    W,
    kv_b,
    kv_h,
    kv_s,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KEEPS_RAW: tl.constexpr,
    KEEPS_QUERIES: tl.constexpr,
) -> None:
    """RoPE of some heads of one token: queries to `q` and the latest W of a block to `queries`,
    keys, and values as they are, to their slot.

    `kv_b` and the like are strides. A slot after the last one is not written.
    """
    row = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, SIZE)[None, :]
    is_there = dims < D
    b = (row // T).to(tl.int64)
    t = row % T
    from_qkv = qkv + row.to(tl.int64) * (H + 2 * K) * D + heads * D
    is_head = is_there & (heads < H + 2 * K)
    plain = tl.load(from_qkv + dims, mask=is_head, other=0.0)
    swapped = tl.load(from_qkv + (dims + D // 2) % D, mask=is_head, other=0.0).to(tl.float32)
    c = tl.load(cos + row * D + dims, mask=is_there, other=0.0)
    s = tl.load(signed_sin + row * D + dims, mask=is_there, other=0.0)
    rotated = tl.fma(swapped, tl.broadcast_to(s, swapped.shape), plain.to(tl.float32) * c)
    rotated = rotated.to(plain.dtype)
    is_query = is_there & (heads < H)
    tl.store(q + (row * H + heads) * D + dims, rotated, mask=is_query)
    if KEEPS_QUERIES:
        place = t - tl.maximum(T - W, 0)
        if place >= 0:
            to_queries = queries + ((b * W + place) * H + heads) * D + dims
            tl.store(to_queries, rotated, mask=is_query)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < S:
        is_key = is_there & (heads >= H) & (heads < H + K)
        place_KD = b * kv_b + ((heads - H) % K).to(tl.int64) * kv_h + slot * kv_s + dims
        tl.store(keys + place_KD, rotated, mask=is_key)
        tl.store(values + place_KD, plain, mask=is_head & (heads >= H + K))
        if KEEPS_RAW:
            tl.store(raw_keys + place_KD, plain, mask=is_key)


@triton.jit  # type: ignore[untyped-decorator]
def add_and_normalize(  # type: ignore[no-untyped-def]
    x, change, weight, total, normed, eps, E, SIZE: tl.constexpr
) -> None:
    """One row: `total` = x + change, and `normed`, its RMSNorm."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, SIZE)
    is_there = dims < E
    place = row * E + dims
    x_E = tl.load(x + place, mask=is_there, other=0.0).to(tl.float32)
    x_E += tl.load(change + place, mask=is_there, other=0.0).to(tl.float32)
    rounded_E = x_E.to(total.dtype.element_ty)
    tl.store(total + place, rounded_E, mask=is_there)
    x_E = rounded_E.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_E * x_E, 0) / E + eps)
    weight_E = tl.load(weight + dims, mask=is_there, other=0.0).to(tl.float32)
    tl.store(normed + place, (x_E * scale * weight_E).to(rounded_E.dtype), mask=is_there)


@triton.jit  # type: ignore[untyped-decorator]
def gate(gate_up, out, I, SIZE: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: E741
    """SiLU(gate) * up of a part of one row, which holds I gates and then I numbers to gate."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    gate_I = tl.load(gate_up + 2 * row * I + dims, mask=dims < I, other=0.0).to(tl.float32)
    up_I = tl.load(gate_up + (2 * row + 1) * I + dims, mask=dims < I, other=0.0).to(tl.float32)
    gated_I = gate_I / (1.0 + tl.exp(-gate_I)) * up_I
    tl.store(out + row * I + dims, gated_I.to(out.dtype.element_ty), mask=dims < I)


def rotate_to_cache(
    qkv_BTX: Tensor,
    num_heads: tuple[int, int],
    rotary: Rotary,
    slots_BT: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    raw_keys_BKSD: Tensor | None = None,
    queries_BWHD: Tensor | None = None,
) -> Tensor:
    """Rotated queries (B, T, H, D) of a block whose K and V it writes to their slots.

    Where they are given, `raw_keys_BKSD` takes the keys as they came, and `queries_BWHD` the
    queries of the block's last tokens.
    """
    B, T, _ = qkv_BTX.shape
    H, K = num_heads
    S, D = keys_BKSD.shape[2:]
    q_BTHD = qkv_BTX.new_empty(B, T, H, D)
    raw = keys_BKSD if raw_keys_BKSD is None else raw_keys_BKSD
    queries = q_BTHD if queries_BWHD is None else queries_BWHD
    assert keys_BKSD.stride() == values_BKSD.stride() == raw.stride()
    assert keys_BKSD.stride(3) == 1
    inputs = (qkv_BTX, rotary.cos, rotary.signed_sin, slots_BT)
    assert all(tensor.is_contiguous() for tensor in (*inputs, queries))
    outputs = (q_BTHD, keys_BKSD, values_BKSD, raw, queries)
    grid = (B * T, triton.cdiv(H + 2 * K, HEADS_PER_PROGRAM))
    with torch.cuda.device_of(qkv_BTX):  # else Triton would launch on the current one
        rotate_and_write[grid](
            *inputs,
            *outputs,
            T,
            S,
            queries.shape[1],
            *keys_BKSD.stride()[:3],
            H=H,
            K=K,
            D=D,
            SIZE=triton.next_power_of_2(D),
            HEADS=HEADS_PER_PROGRAM,
            KEEPS_RAW=raw_keys_BKSD is not None,
            KEEPS_QUERIES=queries_BWHD is not None,
        )
    return q_BTHD


def add_norm(x_BTE: Tensor, change_BTE: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """x + change, and the norm of that."""
    E = x_BTE.shape[-1]
    total_BTE, normed_BTE = torch.empty_like(x_BTE), torch.empty_like(x_BTE)
    assert x_BTE.is_contiguous()
    assert change_BTE.is_contiguous()
    tensors = (x_BTE, change_BTE, norm.weight, total_BTE, normed_BTE)
    size = triton.next_power_of_2(E)
    with torch.cuda.device_of(x_BTE):
        add_and_normalize[(x_BTE.numel() // E,)](*tensors, norm.eps, E, SIZE=size, num_warps=8)
    return total_BTE, normed_BTE


def silu_times(gate_up_BTI: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension times the second half: (B, T, I)."""
    inner = gate_up_BTI.shape[-1] // 2
    assert gate_up_BTI.is_contiguous()
    out = gate_up_BTI.new_empty(*gate_up_BTI.shape[:-1], inner)
    grid = (out.numel() // inner, triton.cdiv(inner, GATES_PER_PROGRAM))
    with torch.cuda.device_of(out):
        gate[grid](gate_up_BTI, out, inner, SIZE=GATES_PER_PROGRAM)
    return out
