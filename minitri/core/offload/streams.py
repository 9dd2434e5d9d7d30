"""A stream of copies next to the computation, and what a GPU's work takes, by events."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minitri.core.stats import Clock


class CopyStream:
    """A stream of copies next to the current one of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """What is queued inside runs on the stream of copies, after what is queued now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def event(self) -> torch.cuda.Event:
        """A mark in a stream's work, to `record` there and to `wait` for on another stream."""
        return torch.cuda.Event()

    def share(self, tensor: Tensor) -> None:
        """Keeps a tensor's memory from reuse until no copy needs it."""
        tensor.record_stream(self._stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._stream.device)


class CudaClock(Clock):
    """Events in the device's work. What it took is known when it is done: after every verdict,
    which the host has waited for anyway."""

    def __init__(self) -> None:
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event, Callable[[float], None]]] = []

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def since(self, start: torch.cuda.Event, take: Callable[[float], None]) -> None:
        self._open.append((start, self.now(), take))

    def settle(self) -> None:
        for start, end, take in self._open:
            end.synchronize()
            take(1e-3 * start.elapsed_time(end))
        self._open.clear()


def clock_of(device: torch.device) -> Clock:
    """The clock for what a device does."""
    return CudaClock() if device.type == "cuda" else Clock()


def synchronize(device: torch.device) -> None:
    """Waits until the device has done everything it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
