"""A second stream of work beside the computation, and the marks by which one waits for the other.

`CudaStreams` are those of a GPU; `NoStreams` is a CPU, which does everything in the order in which it is told to. Tests
have a third kind, which records who touched which bytes when.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A mark in a stream's work, which another stream can wait for. `torch.cuda.Event` is one."""

    def record(self) -> None:
        """Marks where the current stream is."""
        ...

    def wait(self) -> None:
        """Has the current stream wait for the mark; none was made: for nothing."""
        ...


class Streams(Protocol):
    """A second stream of work beside the current one."""

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """What is queued inside runs on the copy stream."""
        ...

    def event(self) -> Event:
        """A new mark."""
        ...

    def share(self, tensor: Tensor) -> None:
        """Says that the copy stream uses a tensor, whose memory must not be given to others before that is done."""
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


class NoEvent:
    """What is told later happens later."""

    def record(self) -> None: ...

    def wait(self) -> None: ...


class NoStreams:
    """A CPU does everything in the order in which it is told to."""

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def event(self) -> Event:
        return NoEvent()

    def share(self, tensor: Tensor) -> None: ...
