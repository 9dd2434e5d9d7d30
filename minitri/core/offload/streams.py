"""Copies that overlap the computation: a CUDA stream, page-locked host memory, a clock of events.
Host memory for K and V is reused, as to lock 60 GiB takes tens of seconds.
"""

import math
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from minitri.core.graphs import WHOLE_DEVICE
from minitri.core.log import log
from minitri.core.stats import Clock


class CopyStream:
    """A CUDA stream for copies that overlap the work of the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        # Captures, which would record copies, have priority 0: PyTorch lends 32 streams in turns.
        self._stream = torch.cuda.Stream(device, priority=-1)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Context in which work is queued on the copy stream, after all of the current stream's."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def share(self, tensor: Tensor) -> None:
        """Keeps a tensor's memory from reuse while copies on this stream still read it."""
        tensor.record_stream(self._stream)


class CudaClock(Clock):
    """Clock of a GPU's work by CUDA events; `settle` waits for them, and reports the seconds."""

    def __init__(self) -> None:
        self._open = list[tuple[torch.cuda.Event, torch.cuda.Event, Callable[[float], None]]]()

    @contextmanager
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
    """A clock for work on this device: by CUDA events on a GPU, else of the host."""
    return CudaClock() if device.type == "cuda" else Clock()


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all queued work."""
    if device.type == "cuda":
        with WHOLE_DEVICE:
            torch.cuda.synchronize(device)


class HostMemory:
    """Host memory for K and V, which is kept when one cache frees it, for the next one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free = deque[Tensor](maxlen=1)  # the latest block that was given back, if any

    @property
    def num_free_bytes(self) -> int:
        return sum(block.nbytes for block in self._free)

    def lend(self, borrower: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Lends an uninitialised tensor until `borrower` is freed; reuses memory freed before."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self.num_free_bytes < num_bytes:
            self._free.clear()
        block = self._free.pop() if self._free else host_memory(num_bytes, self._device)
        synchronize(self._device)  # copies of the last borrower may be under way
        weakref.finalize(borrower, self._free.append, block).atexit = False
        return block[:num_bytes].view(dtype).view(shape)

    def clear(self) -> None:
        self._free.clear()


@torch.inference_mode(False)  # the memory may outlive the run that asks for it
def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Uninitialised bytes (num_bytes,) on the host; for a GPU page-locked: copies can overlap."""
    if device.type != "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):  # few huge pages are locked faster
        with suppress(OSError):
            pages.madvise(advice)
    block = torch.frombuffer(pages, dtype=torch.uint8)
    error = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), num_bytes, 0))
    if error == 0:
        weakref.finalize(block, unregister, block.data_ptr(), device)
        return block
    with suppress(RuntimeError):  # CUDA reports the error once more, to the next call
        torch.zeros(1, device=device)
    with suppress(RuntimeError):  # this allocator rounds up to powers of two
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    problem = "%.1f GB of host memory could not be page-locked (CUDA error %d), so copies are slow"
    log.warning(problem, num_bytes / 1e9, error)
    return block


def unregister(address: int, device: torch.device) -> None:
    """Unlocks host memory that is about to be freed, after all its copies have ended."""
    with WHOLE_DEVICE:
        synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(address)
