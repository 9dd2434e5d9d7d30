"""KV caches: preallocated tensors whose lengths change only by `advance`, `crop` and `reset`."""

from minitri.caches.base import Cache
from minitri.caches.full import FullCache

__all__ = ["Cache", "FullCache"]
