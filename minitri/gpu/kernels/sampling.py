"""From logits to probabilities in one kernel, without a sort: `gpu/sampling.py` says what, and is
the oracle.

One program per row walks it a few times: for the best logit; per filter for a cutoff, by bisection
between keys that the row has; for the mass of what is left; and to write.

Legend: N rows, V vocab.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitri.settings import SamplingParams

BLOCK = 8192
"""Logits of a row that its program holds at a time."""
NUM_WARPS = 32
LAST_KEY = tl.constexpr(0x7F800000)
"""The key of a logit of minus infinity."""


@triton.jit  # type: ignore[untyped-decorator]
def scores_at(row, first, best, temperature, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores of a part of a row, none above 0, and their keys, which rise as scores fall."""
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(row + ids, mask=ids < V, other=-float("inf"))
    scores = tl.div_rn(x - best, temperature)
    return scores, tl.abs(scores).to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def ahead_of(  # type: ignore[no-untyped-def]
    row, best, temperature, V, key, last, UNIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of the tokens with keys below `key`: their mass, or their number if UNIT is 0, and the
    largest key; and the smallest of the other keys, at most `last`."""
    total = tl.zeros([], tl.int64)
    below, above = tl.zeros([], tl.int32), last
    for first in range(0, V, BLOCK):
        scores, keys = scores_at(row, first, best, temperature, V, BLOCK)
        is_ahead = keys < key
        mass = tl.where(UNIT == 0, 1.0, tl.exp(scores) * UNIT).to(tl.int64)
        total += tl.sum(tl.where(is_ahead, mass, 0), 0)
        below = tl.maximum(below, tl.max(tl.where(is_ahead, keys, 0), 0))
        above = tl.minimum(above, tl.min(tl.where(is_ahead, last, keys), 0))
    return total, below, above


@triton.jit  # type: ignore[untyped-decorator]
def last_kept(  # type: ignore[no-untyped-def]
    row, best, temperature, V, last, goal, UNIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest key, at most `last`, ahead of which is less than `goal`, which is above 0."""
    low, high = tl.zeros([], tl.int32), last
    while low < high:
        middle = low + (high - low + 1) // 2
        ahead, below, above = ahead_of(row, best, temperature, V, middle, high, UNIT, BLOCK)
        low, high = tl.where(ahead < goal, above, low), tl.where(ahead < goal, high, below)
    return low


@triton.jit(do_not_specialize=["top_k"])  # type: ignore[untyped-decorator]
def filter_row(  # type: ignore[no-untyped-def]
    logits, probs, numbers, V, stride, top_k, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The distribution of one row."""
    n = tl.program_id(0).to(tl.int64)
    row, out = logits + n * stride, probs + n * V
    wanted = tl.load(numbers).to(tl.float32)
    temperature = tl.where(wanted == 0, 1.0, wanted)
    best, place, num_bad = -float("inf"), 0, 0
    for first in range(0, V, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row + ids, mask=ids < V, other=-float("inf"))
        top = tl.max(x, 0)
        place = tl.where(top > best, tl.min(tl.where(x == top, ids, V), 0), place)
        best = tl.maximum(best, top)
        num_bad += tl.sum((x != x).to(tl.int32), 0)
    is_bad = (num_bad > 0) | (tl.abs(best) == float("inf"))
    last = tl.where((wanted == 0) | is_bad, 0, LAST_KEY)
    if HAS_TOP_K:
        last = last_kept(row, best, temperature, V, last, top_k, 0, BLOCK)
    if HAS_TOP_P:
        total, _, _ = ahead_of(row, best, temperature, V, last + 1, last, UNIT, BLOCK)
        goal = tl.load(numbers + 1) * total.to(tl.float64)
        goal = tl.maximum(tl.ceil(goal).to(tl.int64), 1)
        last = last_kept(row, best, temperature, V, last, goal, UNIT, BLOCK)
    if HAS_MIN_P:
        most = tl.abs(tl.load(numbers + 2)).to(tl.float32).to(tl.int32, bitcast=True)
        last = tl.minimum(last, most)
    total, _, _ = ahead_of(row, best, temperature, V, last + 1, last, UNIT, BLOCK)
    whole = (total.to(tl.float64) / UNIT).to(tl.float32)
    for first in range(0, V, BLOCK):
        scores, keys = scores_at(row, first, best, temperature, V, BLOCK)
        ids = first + tl.arange(0, BLOCK)
        warm = tl.where(keys <= last, tl.div_rn(tl.exp(scores), whole), 0.0)
        chosen = tl.where(wanted == 0, (ids == place).to(tl.float32), warm)
        tl.store(out + ids, tl.where(is_bad, float("nan"), chosen), mask=ids < V)


def filter_rows(
    logits_NV: Tensor, filters: SamplingParams, numbers_3: Tensor, unit: float
) -> Tensor:
    """Probabilities (N, V) of float32 logits; the best token's mass is `unit`."""
    N, V = logits_NV.shape
    top_k, has_top_p, has_min_p = filters.form
    probs_NV = torch.empty(N, V, device=logits_NV.device)
    assert logits_NV.dtype == torch.float32
    assert logits_NV.stride(1) == 1
    with torch.cuda.device_of(logits_NV):  # else Triton would launch on the current one
        filter_row[(N,)](
            logits_NV, probs_NV, numbers_3, V, logits_NV.stride(0), top_k,
            HAS_TOP_K=0 < top_k < V, HAS_TOP_P=has_top_p, HAS_MIN_P=has_min_p, UNIT=unit,
            BLOCK=min(BLOCK, triton.next_power_of_2(V)), num_warps=NUM_WARPS,
        )  # fmt: skip
    return probs_NV
