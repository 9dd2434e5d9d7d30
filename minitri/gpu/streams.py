"""Streams of copies next to the computation, and events by which one waits for another."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from minitri.stats import Clock

Way = Literal["to device", "to host"]
"""Where copies go."""


class NoEvent:
    """An event on a device that does one thing at a time."""

    def record(self) -> None: ...

    def wait(self) -> None: ...


class Streams:
    """Streams of copies next to the current one; here, as on a CPU, all runs in program order."""

    @contextlib.contextmanager
    def copying(self, way: Way) -> Iterator[None]:  # noqa: ARG002 (there is but one stream)
        """What is queued inside runs on the stream for that way, after what is queued now."""
        yield

    def event(self) -> NoEvent | torch.cuda.Event:
        """A mark in a stream's work, to `record` there and to `wait` for on another stream."""
        return NoEvent()

    def share(self, tensor: Tensor) -> None:
        """Keeps a tensor's memory from reuse until no stream of copies needs it."""


class CudaStreams(Streams):
    """A stream for each way on a CUDA device, since a link carries both at once."""

    def __init__(self, device: torch.device) -> None:
        self._copies = {way: torch.cuda.Stream(device) for way in get_args(Way)}

    @contextlib.contextmanager
    def copying(self, way: Way) -> Iterator[None]:
        stream = self._copies[way]
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def share(self, tensor: Tensor) -> None:
        for stream in self._copies.values():
            tensor.record_stream(stream)


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
