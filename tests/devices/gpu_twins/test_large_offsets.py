"""Caches of real sizes: offsets beyond 2^31 bytes, and beyond 2^31 numbers.

Memory is sparse: only pages that are written exist.
"""

import mmap

import pytest
import torch

from minitri.core.caches.full import FullCache
from minitri.core.model.cache import BlockKV, gather_path
from minitri.devices.cpu.kernels import load_kernels
from tests.devices.test_attention import oracle, random_case

L, K, S, D = 32, 32, 122_880, 128


def sparse(num: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros, of which none takes memory before it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, num * dtype.itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"this system lends no sparse memory: {error}")
    return torch.frombuffer(memory, dtype=dtype)


@pytest.mark.slow
def test_the_last_layers_block_lands_at_the_far_end_of_a_cache_of_seven_billion_weights():
    """32 GB of keys, as for 122,880 tokens: by lengths on the host and by slots on the device."""
    flat = sparse(L * K * S * D, torch.bfloat16)
    cache = FullCache(flat.view(L, 1, K, S, D), sparse(64, torch.bfloat16), [S - 4])
    cache.values = cache.keys
    for start, slots_BT in ((S - 4, None), (S - 2, torch.tensor([[S - 2, S - 1]]))):
        new = torch.randn(1, 2, K, D).bfloat16()
        cache.crop([S - 4])
        cache.advance([start - (S - 4)])
        cache.update(L - 1, BlockKV(new, new, new, slots_BT))
        for head in (0, K - 1):
            at = ((L - 1) * K + head) * S * D + (start + 1) * D  # by hand, of the second token
            assert torch.equal(flat[at : at + D], new[0, 1, head])
    tail = cache.keys[L - 1, 0, :, S - 4 :].clone()
    gather_path(cache.keys[-5:], 0, S - 4, [2, 3])  # 2.5 x 10^9 numbers
    assert torch.equal(cache.keys[L - 1, 0, :, S - 3 : S - 1], tail[:, 2:])


def test_kernels_reach_rows_that_are_far_apart():
    """A stride of 32 bits times a row is an offset of 64. Six rows of the real size: the last of
    them begins after 2^31 numbers, though none is as large. They are in the middle of more memory:
    a wrong offset finds zeros, not a fault."""
    pytest.importorskip("triton", reason="needs triton, which is made for Linux")
    if torch.cuda.is_available():
        pytest.skip("sparse memory is the host's")
    from minitri.devices.gpu.kernels.flash_decoding import attend_short_block

    lengths = [0, 3, 70, 1, 17, 66]
    q, *near, _ = random_case(2, lengths, H=4, K=2, D=D, S=80, dtype=torch.float16)
    num, far = 6 * K * S * D, []
    for here in near:
        rows = sparse(3 * num, torch.float16)[num : 2 * num].view(6, K, S, D)[:, ::31]
        rows[:, :, :80] = here
        far.append(rows)
    found = [attend_short_block(q, *far, torch.tensor(lengths))]
    if (compiled := load_kernels()) is not None:
        found.append(compiled.attend(q, *far, lengths))
    for got in found:
        assert (got.double() - oracle(q, *near, lengths)).abs().max() < 3e-3
