"""The memory pool: keeps the memory of an engine's last run for the next one.

A run of as many texts that fits into that memory, with the same settings, begins there: with the
graphs that were captured on a GPU, and after those first tokens of its prompts that the full cache
still holds. Other settings make new small caches over the same full cache. Host memory of a KV
cache is kept in any case.
"""

import dataclasses
from collections.abc import Sequence

from minitri.caches.prefixes import HeldRow
from minitri.gpu.offload.host_memory import HostMemory
from minitri.gpu.offload.offloaded_cache import OffloadedFullCache
from minitri.memory import Memory, MemoryShape, Models, allocate

WORTH_COPYING = 64
"""Tokens at the beginning of a prompt for which two full caches may be in memory for a moment."""


class MemoryPool:
    """The memory of runs over some models; at most one is kept, of the run that was opened last."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.host = HostMemory(models.target.device)
        self.snapshot: HeldRow | None = None
        """What the texts of later runs may begin with, too."""
        self._kept: Memory | None = None
        self._latest: int | None = None  # by its id, so that the run alone keeps it alive

    def open(self, shape: MemoryShape, prompts: Sequence[list[int]]) -> Memory:
        """Memory for a run: what was kept, or new. Raises `InputError` if there is no room."""
        kept = self._kept
        self._kept = None
        if kept is not None and self._can_run(kept, shape):
            memory = kept
        else:
            full = kept.full if kept is not None and fits(kept, shape) else None
            held = None
            if kept is not None and (full is not None or is_worth_copying(kept, prompts)):
                held = kept.prefix
            del kept  # gives up its memory for the new one
            memory = allocate(self.models, shape, full=full, held=held, host=self.host)
        memory.prefix.snapshot = self.snapshot
        self._latest = id(memory)
        return memory

    def put(self, memory: Memory, *, was_interrupted: bool = False) -> None:
        """Keeps the memory of a run that is over, if it is the latest.

        K and V in host memory serve one run only where this was interrupted in the middle of a
        step, which may leave its buffers half written; or where a shorter text may have room for
        more layers on the device: with no `on_chip`, unless it was reserved for longer texts.
        """
        generation = memory.shape.generation
        is_fitted = generation.on_chip is None and not generation.reserve
        is_spent = isinstance(memory.full, OffloadedFullCache) and (is_fitted or was_interrupted)
        if id(memory) == self._latest and not is_spent:
            self._kept = memory

    @property
    def held(self) -> HeldRow | None:
        """The longest text whose K and V are kept."""
        row = self._kept.prefix.longest if self._kept is not None else None
        return row or self.snapshot

    def clear(self) -> None:
        """Frees what is kept; a run that is under way will not be kept either."""
        self._kept = self.snapshot = self._latest = None
        self.host.clear()

    def _can_run(self, kept: Memory, new: MemoryShape) -> bool:
        """Whether the memory, and what was captured in it, serve a run of another shape."""
        old = kept.shape
        cache = kept.retrieval_cache
        settings = old.speculation
        # Every run may choose these two for itself.
        wanted = dataclasses.replace(
            new.speculation, coupled=settings.coupled, timed=settings.timed
        )
        policies = (settings.policy, new.speculation.policy)
        return (
            fits(kept, new)
            and all(isinstance(policy, str) for policy in policies)  # another keeps its own state
            and all(runner.can_sample_by(new.sampling) for runner in kept.runners)
            and new.generation.prefill_chunk <= old.generation.prefill_chunk
            and wanted == settings
            and (
                cache is None or max(map(new.budget_for, new.reserved_lengths)) <= cache.max_budget
            )
        )


def fits(kept: Memory, new: MemoryShape) -> bool:
    """Whether the full cache serves a run of another shape."""
    old = kept.shape
    placed = ("offload", "on_chip", "cuda_graphs")
    return (
        new.num_rows == old.num_rows
        and new.capacity <= kept.full.capacity
        and all(getattr(new.generation, n) == getattr(old.generation, n) for n in placed)
    )


def is_worth_copying(kept: Memory, prompts: Sequence[list[int]]) -> bool:
    """Whether to copy what a run left into a larger cache, which must fit next to it."""
    if kept.full.device.type == "cuda" or isinstance(kept.full, OffloadedFullCache):
        return False
    return any(kept.prefix.num_shared(prompt) >= WORTH_COPYING for prompt in prompts)
