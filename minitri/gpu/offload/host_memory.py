"""Host memory for K and V: page-locked where a GPU is to copy it.

The system must find every page first, tens of seconds for 60 GiB of 4 KiB each by one thread. So
pages are huge, if there are such, several threads touch them, and a cache that is gone leaves its
memory to the next one.
"""

import contextlib
import logging
import math
import mmap
import weakref

import torch
from torch import Tensor

from minitri.gpu.streams import synchronize

log = logging.getLogger("minitri")


class HostMemory:
    """Blocks of host memory that caches borrow, one after another."""

    def __init__(self, device: torch.device) -> None:
        """For copies to and from this device."""
        self._device = device
        self._free: list[Tensor] = []

    @property
    def num_free_bytes(self) -> int:
        """Bytes that are kept while nobody uses them."""
        return sum(block.nbytes for block in self._free)

    def lend(self, borrower: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory, which comes back when the borrower is gone.

        It is the smallest block that is large enough; if there is none, a new one takes the place
        of all that are free.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        self._free.sort(key=lambda block: block.nbytes)
        place = next((n for n, it in enumerate(self._free) if it.nbytes >= num_bytes), None)
        if place is not None:
            block = self._free.pop(place)
            synchronize(self._device)  # copies of the last borrower may be under way
        else:
            self._free.clear()
            block = host_memory(num_bytes, self._device)
        weakref.finalize(borrower, self._free.append, block).atexit = False
        return block[:num_bytes].view(dtype).view(shape)

    def clear(self) -> None:
        """Frees what nobody uses."""
        self._free.clear()


@torch.inference_mode(False)  # it may outlive the run that asks for it
def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Uninitialised bytes of the host; for a GPU page-locked, so that the computation goes on while
    they are copied.

    They are registered rather than taken from PyTorch's pinned allocator, which rounds up to powers
    of two.
    """
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones: 4 KiB
    with contextlib.suppress(AttributeError, OSError):  # no such system, or huge pages are off
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type != "cuda":
        return block
    block[:: mmap.PAGESIZE].zero_()  # by all threads
    error = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), num_bytes, 0))
    if error == 0:
        weakref.finalize(block, unregister, block.data_ptr(), device)
        return block
    with contextlib.suppress(RuntimeError):  # CUDA reports the error once more, to the next call
        torch.zeros(1, device=device)
    problem = (
        "%.1f GB of host memory could not be page-locked (CUDA error %d), so copies are slow and "
        "the computation waits for them; raise the limit on locked memory (ulimit -l)"
    )
    log.warning(problem, num_bytes / 1e9, error)
    return block


def unregister(address: int, device: torch.device) -> None:
    """Unlocks host memory that is about to be freed, once no copy from it can be under way."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)
