"""Page-locked host memory for K and V, which is reused: to lock 60 GiB takes tens of seconds."""

import math
import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from minitri.core.log import log
from minitri.core.offload.streams import synchronize


class HostMemory:
    """A block of host memory that offloaded caches borrow one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []  # the latest block that was given back, if any

    @property
    def num_free_bytes(self) -> int:
        return sum(block.nbytes for block in self._free)

    def lend(self, borrower: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Lends uninitialised memory until `borrower` is freed: the kept block if large enough."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self.num_free_bytes < num_bytes:
            self._free.clear()
        block = self._free.pop() if self._free else host_memory(num_bytes, self._device)
        synchronize(self._device)  # copies of the last borrower may be under way
        weakref.finalize(borrower, self._take_back, block).atexit = False
        return block[:num_bytes].view(dtype).view(shape)

    def _take_back(self, block: Tensor) -> None:
        self._free[:] = [block]

    def clear(self) -> None:
        self._free.clear()


@torch.inference_mode(False)  # the memory may outlive the run that asks for it
def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Allocates uninitialised bytes, for a GPU page-locked: copies run next to the computation."""
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
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)
