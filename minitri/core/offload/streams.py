"""CUDA streams and events: copies next to the computation, and a clock of the device's work."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minitri.core.stats import Clock


class CopyStream:
    """A CUDA stream for copies, next to the device's current one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Context in which work is queued on the copy stream, after all work queued before."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def share(self, tensor: Tensor) -> None:
        """Keeps a tensor's memory from reuse while copies on this stream still read it."""
        tensor.record_stream(self._stream)


class CudaClock(Clock):
    """A clock of a GPU's work by CUDA events, which `settle` reads when the host waits anyway."""

    def __init__(self) -> None:
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event, Callable[[float], None]]] = []

    @contextlib.contextmanager
    def timed(self, take: Callable[[float], None]) -> Iterator[None]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._open.append((start, end, take))

    def settle(self) -> None:
        for start, end, take in self._open:
            end.synchronize()
            take(1e-3 * start.elapsed_time(end))
        self._open.clear()


def clock_of(device: torch.device) -> Clock:
    """A clock of the device's work: by CUDA events, or of the host."""
    return CudaClock() if device.type == "cuda" else Clock()


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
