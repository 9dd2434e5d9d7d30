"""K and V in host memory on a CUDA device: the bits of those on the device, page-locked memory."""

import gc
from unittest.mock import Mock

import pytest
import torch

from minitri.core.caches.full import FullCache
from minitri.core.model.llama import Llama
from minitri.core.offload.offloaded_cache import OffloadedFullCache
from minitri.core.offload.streams import HostMemory
from tests.core.rigs import tiny_config
from tests.devices.gpu_twins.conftest import check_blocks


@pytest.mark.takes(seconds=10, gib=1)
def test_host_memory_is_page_locked_once(caplog):
    """The host goes on while locked memory is copied: else offloading is many times as slow."""
    host, addresses = HostMemory(torch.device("cuda")), set()
    for num_bytes in (1 << 26, 1 << 25):
        cache = Mock()
        block = host.lend(cache, (num_bytes,), torch.uint8)
        assert block.is_pinned()
        block.fill_(7)
        assert int(block.to("cuda", non_blocking=True).sum()) == 7 * num_bytes
        addresses.add(block.data_ptr())
        del cache
        gc.collect()
    assert len(addresses) == 1
    host.clear()
    assert not block.is_pinned()
    assert not caplog.records


@pytest.mark.takes(seconds=20, gib=1)
@torch.inference_mode()
def test_offload_holds_the_bits_of_the_full_cache():
    """Copies of large layers are under way meanwhile."""
    config = tiny_config(num_layers=6, num_heads=8, num_kv_heads=8, head_dim=64)
    model = Llama(config, dtype=torch.bfloat16, device=torch.device("cuda"))
    whole = FullCache.allocate(model, 2, 8192)
    ours = OffloadedFullCache(model, 2, 8192, on_chip=2, host=HostMemory(model.device))
    check_blocks(ours, whole, (3000, 1, 7, 4, 2000, 4, 1, 900))
