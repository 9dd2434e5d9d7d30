"""Caches of real sizes: offsets beyond 2^31 bytes, and beyond 2^31 numbers.

Memory is sparse: only pages that are written exist.
"""

from __future__ import annotations

import mmap

import pytest
import torch

from minitri.caches.full import FullCache
from minitri.cpu.kernels import load_kernels
from minitri.gpu.attention import ShortBlock, TritonAttention
from minitri.model.attention import attend_math
from minitri.model.cache import BlockKV, gather_path
from minitri.model.rope import Rope, RopeConfig
from tests.model.test_attention import random_case

L, K, S, D = 32, 32, 122_880, 128
HUGE = 2**31 + 64
"""Numbers between the heads of a cache."""


def sparse(num: int, dtype: torch.dtype) -> torch.Tensor:
    """So many zeros, of which none takes memory before it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, num * dtype.itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"this system lends no sparse memory: {error}")
    return torch.frombuffer(memory, dtype=dtype)


def test_the_last_layers_block_lands_at_the_far_end_of_a_cache_of_seven_billion_weights():
    """32 GB of keys, as for 122,880 tokens: by lengths on the host and by slots on the device."""
    flat = sparse(L * K * S * D, torch.bfloat16)
    cache = FullCache(flat.view(L, 1, K, S, D), sparse(64, torch.bfloat16), [S - 4])
    cache.values = cache.keys
    for start, slots_BT in ((S - 4, None), (S - 2, torch.tensor([[S - 2, S - 1]]))):
        new = torch.randn(1, 2, K, D).bfloat16()
        cache._set_lengths([start])
        cache.update(L - 1, BlockKV(new, new, new, slots_BT))
        for head in (0, K - 1):
            at = ((L - 1) * K + head) * S * D + (start + 1) * D  # by hand, of the second token
            assert torch.equal(flat[at : at + D], new[0, 1, head])
    tail = cache.keys[L - 1, 0, :, S - 4 :].clone()
    gather_path(cache.keys[-5:], 0, S - 4, [2, 3])  # 2.5 x 10^9 numbers
    assert torch.equal(cache.keys[L - 1, 0, :, S - 3 : S - 1], tail[:, 2:])


def far_apart(slots_BKSD: torch.Tensor) -> torch.Tensor:
    """The same numbers in a cache whose heads are `HUGE` numbers apart."""
    B, heads, _, dims = slots_BKSD.shape
    flat = sparse(B * heads * HUGE, slots_BKSD.dtype)
    far = flat.as_strided(slots_BKSD.shape, (heads * HUGE, HUGE, dims, 1))
    far.copy_(slots_BKSD)
    return far


def test_triton_attention_reads_heads_that_are_far_apart():
    pytest.importorskip("triton", reason="needs triton, which is made for Linux")
    q, k, v, lengths = random_case(2, (70, 5), H=4, K=2, D=16, S=128, dtype=torch.float16)
    exact = attend_math(q.double(), k.double(), v.double(), lengths)
    if torch.cuda.is_available():
        pytest.skip("sparse memory is the host's")
    block = ShortBlock(q, far_apart(k), far_apart(v), torch.tensor(lengths))
    got = TritonAttention(num_processors=4)(block)
    assert (got.double() - exact).abs().max() < 0.01


def test_the_fused_kernel_writes_to_heads_that_are_far_apart():
    pytest.importorskip("triton", reason="needs triton, which is made for Linux")
    from minitri.gpu.kernels.fused import rotate_to_cache

    if torch.cuda.is_available():
        pytest.skip("sparse memory is the host's")
    qkv, near = torch.randn(2, 3, 8 * 16), torch.zeros(2, 2, 128, 16)
    slots_BT = torch.tensor([[70, 71, 72], [5, 6, 7]])
    rotary = Rope(RopeConfig(), 16, torch.device("cpu")).at(slots_BT)
    found = []
    for keys, values in ((near.clone(), near.clone()), (far_apart(near), far_apart(near))):
        rotate_to_cache(qkv, (4, 2), rotary, slots_BT, keys, values, None, None)
        found.append((keys.clone(), values.clone()))
    assert found[0][0].any()
    assert all(map(torch.equal, *found))


@pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")
def test_the_compiled_cpu_kernel_reads_heads_that_are_far_apart():
    q, k, v, lengths = random_case(2, (70, 5), H=4, K=2, D=16, S=128)
    exact = attend_math(q.double(), k.double(), v.double(), lengths)
    kernels = load_kernels()
    got = kernels.attend(q, far_apart(k), far_apart(v), lengths)
    assert (got.double() - exact).abs().max() < 1e-5
