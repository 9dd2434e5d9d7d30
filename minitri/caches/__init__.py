"""KV caches: preallocated tensors whose lengths change only between passes, never inside one."""

from minitri.model.cache import Cache
from minitri.caches.full import FullCache

__all__ = ["Cache", "FullCache"]
