"""How fast this machine moves bytes: what benchmarks compare decoding with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from minitri.gpu.offloaded_cache import host_memory
from minitri.runner import synchronize

REPEATS = 7


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second at which a large tensor is read."""
    data = torch.ones(_num_bytes(device) // 4, device=device)
    return data.nbytes / _seconds(data.sum, device)


def copy_bandwidth(device: torch.device, *, from_host: bool) -> float:
    """Bytes per second of a copy: read and written on the device, or sent to it from the host."""
    target = torch.empty(_num_bytes(device), dtype=torch.uint8, device=device)
    shape = tuple(target.shape)
    source = host_memory(shape, torch.uint8, device) if from_host else torch.empty_like(target)
    source.zero_()
    seconds = _seconds(lambda: target.copy_(source, non_blocking=True), device)
    return (1 if from_host else 2) * target.nbytes / seconds


def _num_bytes(device: torch.device) -> int:
    """Far beyond most caches; on a GPU so many that the start of a copy does not count."""
    if device.type != "cuda":
        return 1 << 28
    free, _ = torch.cuda.mem_get_info(device)
    return min(1 << 31, free // 4)


def _seconds(move: Callable[[], object], device: torch.device) -> float:
    """The median of several times."""
    times = []
    for _ in range(REPEATS):
        synchronize(device)
        started = time.perf_counter()
        move()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
