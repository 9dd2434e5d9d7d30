"""KV caches: preallocated tensors whose lengths change between forward passes, never inside one."""
