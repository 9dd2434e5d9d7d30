"""Allocation of the full cache, on the device or partly in host memory; see `placement.py`."""

import contextlib
import math
from pathlib import Path

import torch

from minitri.core.caches.full import FullCache
from minitri.core.errors import InputError
from minitri.core.log import log
from minitri.core.model.cache import plain_slots
from minitri.core.model.llama import Llama
from minitri.core.offload.host_memory import HostMemory
from minitri.core.offload.offloaded_cache import OffloadedFullCache
from minitri.core.offload.placement import Demand, choose_on_chip


def free_host_bytes() -> float:
    """Bytes of host memory that are free for us, page cache included."""
    free = [math.inf]
    with contextlib.suppress(OSError, IndexError, ValueError):
        _, available = Path("/proc/meminfo").read_text().split("MemAvailable:")
        free.append(1024.0 * int(available.split()[0]))
    with contextlib.suppress(OSError, KeyError, ValueError):  # "max" where there is no limit
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
        taken = dict(line.split() for line in lines)
        limit = float(Path("/sys/fs/cgroup/memory.max").read_text())
        free.append(limit - int(taken["anon"]) - int(taken["shmem"]))
    return min(free)


def room_for(target: Llama, needs: Demand) -> tuple[float, float]:
    """Bytes that each rank can use on its device, with its weights, and in host memory."""
    ranks = target.execution.ranks
    on_host = ranks.least(free_host_bytes()) / ranks.count
    on_device = on_host
    if target.device.type == "cuda":
        # Memory that the allocator still keeps is in small blocks, of no use to large tensors.
        torch.cuda.empty_cache()
        on_device = ranks.least(float(torch.cuda.mem_get_info(target.device)[0]))
    return on_device + needs.num_weight_bytes, on_host


def allocate_full_cache(target: Llama, needs: Demand, host: HostMemory | None = None) -> FullCache:
    """An empty full cache, on the device or partly in memory of `host`. Raises `InputError`."""
    L = target.config.num_layers
    shape = needs.shape
    device = target.device
    on_chip = L
    size = (shape.num_rows, shape.capacity)
    host = host or HostMemory(device)
    try:
        if device.type == "cuda":
            on_device, on_host = room_for(target, needs)
            on_host += host.num_free_bytes
            on_chip = choose_on_chip(needs, on_device, on_host)
        elif shape.generation.offload:
            raise InputError("offload=True is for GPUs, and this is none; leave it out")
        if on_chip == L:
            return FullCache.allocate(target, *size, target.execution.make_slots or plain_slots)
        log.debug("KV cache: %d of %d layers are on %s", on_chip, L, device)
        return OffloadedFullCache(target, *size, on_chip=on_chip, host=host)
    except (RuntimeError, OSError):  # out of memory, on CUDA too
        needed = L * needs.kv_layer
        raise InputError(
            f"the KV cache for {shape.num_rows} x {shape.capacity} tokens needs "
            f"{needed / 1e9:.1f} GB, which {device} does not have; shorten the prompt, lower "
            "max_new_tokens, or use a smaller dtype"
        ) from None
