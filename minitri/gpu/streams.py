"""A second stream of work beside the computation, and events by which one waits for the other."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A mark in a stream's work that another stream can wait for, as `torch.cuda.Event` is."""

    def record(self) -> None:
        """Marks what has been queued on the current stream so far."""
        ...

    def wait(self) -> None:
        """Has the current stream wait for the mark, or for nothing if none was made."""
        ...


class Streams(Protocol):
    """A copy stream beside the current one."""

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """What is queued inside runs on the copy stream."""
        ...

    def event(self) -> Event: ...

    def share(self, tensor: Tensor) -> None:
        """Keeps a tensor's memory from reuse until the copy stream is done with it."""
        ...


class CudaStreams:
    """A copy stream on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._copies = torch.cuda.Stream(device)

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._copies)

    def event(self) -> Event:
        return torch.cuda.Event()

    def share(self, tensor: Tensor) -> None:
        tensor.record_stream(self._copies)


class NoStreams:
    """Copies and computation in program order, so that no event has anything to do."""

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def event(self) -> Event:
        return NoEvent()

    def share(self, tensor: Tensor) -> None: ...


class NoEvent:
    """An event on a device that does one thing at a time."""

    def record(self) -> None: ...

    def wait(self) -> None: ...
