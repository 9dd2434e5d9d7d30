"""A second stream of work beside the computation, and events by which the latter waits for it."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class NoEvent:
    """An event on a device that does one thing at a time."""

    def record(self) -> None: ...

    def wait(self) -> None: ...


class Streams:
    """A copy stream beside the current one; here, as on a CPU, all runs in program order."""

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """What is queued inside runs on the copy stream, behind what the current one has so far."""
        yield

    def event(self) -> NoEvent | torch.cuda.Event:
        """A mark in a stream's work, to `record` there and to `wait` for on another stream."""
        return NoEvent()

    def share(self, tensor: Tensor) -> None:
        """Keeps a tensor's memory from reuse until the copy stream is done with it."""


class CudaStreams(Streams):
    """A copy stream on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._copies = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        self._copies.wait_stream(torch.cuda.current_stream(self._copies.device))
        with torch.cuda.stream(self._copies):
            yield

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def share(self, tensor: Tensor) -> None:
        tensor.record_stream(self._copies)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done everything it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
