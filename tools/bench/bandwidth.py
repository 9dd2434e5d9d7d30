"""How fast this machine moves bytes, and how long its GPU does nothing."""

import math
import time
from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer

from minitri.core.offload.streams import host_memory


def copy_bandwidth(device: torch.device, *, from_host: bool) -> float:
    """Bytes per second of a copy: read and written on the device, or sent to it from the host."""
    target = torch.empty(_num_bytes(device), dtype=torch.uint8, device=device)
    source = host_memory(target.nbytes, device) if from_host else torch.empty_like(target)
    source.zero_()
    seconds = median_seconds(lambda: target.copy_(source, non_blocking=True))
    return (1 if from_host else 2) * target.nbytes / seconds


def _num_bytes(device: torch.device) -> int:
    """Far beyond most caches; on a GPU enough that the start of a copy does not count."""
    if device.type != "cuda":
        return 1 << 28
    free, _ = torch.cuda.mem_get_info(device)
    return min(1 << 31, free // 4)


def median_seconds(move: Callable[[], object]) -> float:
    """The median of several times, until a GPU is done, too."""
    timer = Timer("move()", globals={"move": move}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange().median


def idle_share(step: Callable[[], object], num_steps: int) -> float:
    """Share of the time of some steps in which a GPU neither computes nor copies.

    Recording slows the host down a little, so it is rather too high.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        started = time.perf_counter()
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    events = [event for event in recorded.events() or () if event.device_type.name == "CUDA"]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    return 1 - 1e-6 * covered(spans) / seconds


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals, which may overlap."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
