"""Offloaded caches on a CPU, where copies run in program order."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minitri.core.caches.full import FullCache
from minitri.core.offload.host_memory import HostMemory
from minitri.core.offload.offloaded_cache import OffloadedFullCache
from tests.core.rigs import CPU, tiny_config

CONFIG = tiny_config(num_layers=5)
TOKEN = 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4
"""Bytes of K and V of a token in one layer."""


class NoEvent:
    """An event on a device that does one thing at a time."""

    def record(self) -> None: ...

    def wait(self) -> None: ...


class InOrder:
    """The twin of a `CopyStream`."""

    @contextlib.contextmanager
    def copying(self):
        yield

    def event(self):
        return NoEvent()

    def share(self, tensor) -> None: ...

    def synchronize(self) -> None: ...


def offloaded(
    on_chip: int, batch_size: int = 3, capacity: int = 512, stream=None, config=CONFIG, **settings
) -> OffloadedFullCache:
    settings = {"host": HostMemory(CPU), **settings}
    settings |= {"on_chip": on_chip, "dtype": torch.float32, "device": CPU}
    settings["stream"] = stream or InOrder()
    return OffloadedFullCache(config, batch_size, capacity, **settings)


class Traffic(TorchDispatchMode):
    """Counts the bytes that travel between the device and the host memory of a cache."""

    def __init__(self, cache: OffloadedFullCache) -> None:
        super().__init__()
        self.host = cache.host_LBSPKD
        self.to_device = self.to_host = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            start = self.host.data_ptr()
            is_host = [start <= it.data_ptr() < start + self.host.nbytes for it in args[:2]]
            self.to_host += is_host[0] * args[0].nbytes
            self.to_device += is_host[1] * args[0].nbytes
            assert not any(is_host) or all(it.is_contiguous() for it in args[:2])
        return func(*args, **(kwargs or {}))


def assert_same(ours: OffloadedFullCache, theirs: FullCache) -> None:
    """All that is held, by every way to read it."""
    assert ours.lengths == theirs.lengths
    for b, length in enumerate(theirs.lengths):
        spans = ((0, length), (max(0, length - 9), length), (length // 2, length))
        pairs = [(ours.tokens(b, *span), theirs.tokens(b, *span)) for span in spans]
        for layers in (ours.held_layers(b), ours.layers(b)):
            for got, exact in zip(layers, theirs.layers(b), strict=True):
                cut = ([slots[:, :length].clone() for slots in pair] for pair in (got, exact))
                pairs.append(tuple(cut))
        for got, exact in pairs:
            assert all(map(torch.equal, got, exact))
