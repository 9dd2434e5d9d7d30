"""K and V in host memory on a CUDA device: the bits of those on the device, page-locked memory."""

import pytest
import torch

from minitri.core.caches.full import FullCache
from minitri.core.model.cache import BlockKV
from minitri.core.offload.host_memory import HostMemory, host_memory
from minitri.core.offload.offloaded_cache import OffloadedFullCache
from tests.conftest import fill
from tests.core.rigs import tiny_config
from tests.devices.gpu_twins.offload import assert_same


@pytest.mark.takes(seconds=10, gib=1)
def test_host_memory_is_page_locked(caplog):
    """So that the host goes on while it is copied: else offloading is many times as slow."""
    block = host_memory(1 << 26, torch.device("cuda"))
    assert not caplog.records
    assert block.is_pinned()
    block.fill_(7)
    assert int(block.to("cuda", non_blocking=True).sum()) == 7 << 26


@pytest.mark.takes(seconds=20, gib=1)
@torch.inference_mode()
def test_offload_holds_the_bits_of_the_full_cache():
    """Blocks of many sizes, kept in part, while copies of large layers are under way, after what
    another cache held."""
    config = tiny_config(num_layers=6, num_heads=8, num_kv_heads=8, head_dim=64)
    settings = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    whole, ours = FullCache.allocate(config, 2, 8192, **settings), None
    generator = torch.Generator("cuda").manual_seed(0)
    for slots in (whole.keys, whole.values):
        slots.normal_(generator=generator)
    whole.advance([1900, 3])
    host = HostMemory(settings["device"])
    ours = OffloadedFullCache(config, 2, 8192, on_chip=2, host=host, **settings)
    fill(ours, whole)
    for size in (3000, 1, 7, 2000, 4, 4, 1, 900):
        starts_B1 = torch.tensor(whole.lengths, device="cuda").unsqueeze(1)
        slots_BT = starts_B1 + torch.arange(size, device="cuda") if size < 10 else None
        for layer in range(6):
            k, v = (torch.randn(2, size, 8, 64, generator=generator, **settings) for _ in range(2))
            block = BlockKV(k, k, v, slots_BT)
            pairs = zip(ours.update(layer, block), whole.update(layer, block), strict=True)
            for got, exact in pairs:
                for b, length in enumerate(whole.lengths):
                    end = length + size
                    assert torch.equal(got[b, :, :end], exact[b, :, :end]), (size, layer)
        for cache in (whole, ours):
            cache.advance([size, size])
            cache.crop([length - size // 3 for length in cache.lengths])
    assert_same(ours, whole)
