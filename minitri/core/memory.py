"""The memory of a run, allocated once: KV caches, model runners over them, captured CUDA graphs.

A `Memory` knows no request: for each run `stack.py` builds a cascade of models over the memory.
`MemoryPool` keeps the memory of the latest run for the next one.
"""

import contextlib
import math
import operator
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from minitri.core.caches.full import FullCache, HeldRow
from minitri.core.caches.prefixes import PrefixCache, Store
from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.caches.streaming import StreamingCache
from minitri.core.decoding.level import Level
from minitri.core.drafters.plugin import Drafter
from minitri.core.errors import FaultError, InputError, NotFiniteError, shorten
from minitri.core.graphs import WHOLE_DEVICE, GraphPool
from minitri.core.log import log
from minitri.core.model.cache import plain_slots
from minitri.core.model.llama import Llama
from minitri.core.offload.offloaded_cache import OffloadedFullCache
from minitri.core.offload.placement import Demand, choose_on_chip
from minitri.core.offload.streams import HostMemory
from minitri.core.runner import DraftRunner, ModelRunner, Passes
from minitri.core.settings import LONGEST_BLOCK
from minitri.core.shape import MemoryShape

WORTH_COPYING = 64  # least shared tokens for which an old text is copied to a larger cache


@dataclass(frozen=True, eq=False)
class Models:
    """The loaded models of an engine, with the lock of the thread that computes."""

    target: Llama  # the model whose distribution the text follows
    retrieval: Llama  # the target, or a copy of it in fewer bits
    draft: Llama | None = None  # a small model of the same vocabulary, or none
    drafter: Drafter | None = None  # instead of `draft`; without either, lookup in the text
    level_type: type[Level] = Level  # of all levels; an engine has `TreeLevel` of `minitri.trees`
    lock: Any = field(default_factory=threading.RLock)  # held by the thread that computes
    process: int = field(default_factory=os.getpid)  # id of the process that loaded the models

    @property
    def drafter_name(self) -> str:
        """Name of the user's drafter, or of the draft model, or `suffix` for lookup."""
        if self.drafter is not None:
            return type(self.drafter).__name__
        return self.draft.config.name if self.draft else "suffix"


def demand_of(models: Models, shape: MemoryShape) -> Demand:
    """Memory that a run of these models needs, for the lengths and settings in `shape`."""
    draft = models.draft.config if models.draft else None
    target = models.target
    captures = shape.generation.cuda_graphs and target.device.type == "cuda"
    return Demand(target.config, draft, shape, target.dtype.itemsize, captures=captures)


def check_process(models: Models) -> None:
    """Raises `FaultError` in a process that was forked from the one that loaded the models."""
    if os.getpid() != models.process:
        raise FaultError(
            f"the engine was loaded by process {models.process}, from which this one was forked, "
            "without its threads; load it here, or start processes by spawn"
        )


@contextlib.contextmanager
def computing(models: Models) -> Iterator[None]:
    """Context for computing: holds the models' lock; lack of memory or NaN becomes `FaultError`."""
    check_process(models)
    try:
        with models.lock, torch.inference_mode(), torch.cuda.device_of(models.target.norm.weight):
            yield
    except (RuntimeError, MemoryError, NotFiniteError) as error:
        raise (fault_of(error, models) or error) from error.__cause__


def fault_of(error: BaseException, models: Models) -> FaultError | None:
    """A `FaultError` for lack of memory or numbers that are not finite; None for other errors."""
    model = models.target
    if isinstance(error, NotFiniteError):
        if reason := str(error):  # of its grammar
            return FaultError(f"the grammar is too complex here ({reason}); simplify it")
        names = dict.fromkeys(m.config.name for m in (model, models.draft) if m)
        return FaultError(
            f"{' or '.join(names)} computed logits that are not finite in {model.dtype}; the "
            "weights are damaged, or overflow: get them again",
            "try dtype=float32",
        )
    signs = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # CUDA, CPU, cuBLAS
    if any(sign in str(error) for sign in signs) or isinstance(error, MemoryError):
        return FaultError(
            f"{model.device} has run out of memory ({shorten(error, 90)})",
            "shorten the prompt",
            "lower max_new_tokens=",
            "lower prefill_chunk=",
        )
    return None


@dataclass(frozen=True, eq=False)
class Memory:
    """KV caches, model runners and captured CUDA graphs of a run."""

    models: Models
    shape: MemoryShape  # of the run that allocated it; later runs need no more
    full: FullCache  # of the target
    prefix: PrefixCache  # finds texts that `full` still holds
    runners: dict[str, ModelRunner]  # models with their caches by stage, from the lowest upwards
    graphs: GraphPool | None  # captured CUDA graphs, on a GPU
    retrieval_cache: RetrievalCache | None


def allocate(
    models: Models,
    shape: MemoryShape,
    *,
    full: FullCache | None = None,
    held: PrefixCache | None = None,
    graphs: GraphPool | None = None,
    host: HostMemory | None = None,
) -> Memory:
    """Allocates caches, and runners of `models` over them, for this shape. Raises `InputError`.
    `full` and `graphs` are of an earlier run, for reuse; so is `held`, whose texts are copied.
    The target gets no CUDA graphs if its cache is in host memory, which `host` lends."""
    target = models.target
    speculation = shape.speculation
    needs = demand_of(models, shape)
    if not full:
        full = allocate_full_cache(target, needs, host)
    # K and V from decoding differ in their last bits from those of prefill. Where kernels promise
    # that a text has the same bits as in a fresh run, only K and V of prompts are reused.
    reuses_generated = not target.execution.is_row_invariant
    prefix = PrefixCache(full, speculation.max_block, reuses_generated=reuses_generated)
    if held:  # now, as capturing graphs overwrites the first slots of empty rows
        prefix.adopt(held)
    if not graphs and needs.captures:
        graphs = GraphPool(target.device)
    V = target.config.vocab_size
    runners = dict[str, ModelRunner]()
    cache: RetrievalCache | None = None
    if models.draft and "draft" in shape.stages:
        window = StreamingCache(models.draft, shape.num_rows, speculation)
        # Trees replay a pass for each depth; of chains `Level.capture` captures whole rounds.
        sizes = {speculation.max_block} if speculation.tree else set[int]()
        passes = Passes(models.draft, window, shape.sampling, V)
        runners["draft"] = DraftRunner(passes, graphs=graphs, block_sizes=sizes)
    if "retrieval" in shape.stages:
        cache = RetrievalCache(full, target, speculation, shape.budgets)
        sizes = {1, speculation.small_block}
        passes = Passes(models.retrieval, cache, shape.sampling, V)
        runners["retrieval"] = ModelRunner(passes, graphs=graphs, block_sizes=sizes)
    if isinstance(full, OffloadedFullCache):
        full.subscribe(cache)
    # Graphs for 0, up to 4, up to 8, and all guesses: few, as capturing takes time.
    runners["target"] = ModelRunner(
        Passes(target, full, shape.sampling, V, cache.queries_LBTHD if cache else None),
        graphs=None if full.is_hosted else graphs,
        block_sizes={min(size, speculation.max_block) for size in (1, 5, 9, LONGEST_BLOCK)},
    )
    return Memory(models, shape, full, prefix, runners, graphs, cache)


def free_host_bytes() -> float:
    """Bytes of host memory that this process can still take, page cache included; inf: unknown."""
    free = [math.inf]
    with contextlib.suppress(OSError, IndexError, ValueError):
        _, available = Path("/proc/meminfo").read_text().split("MemAvailable:")
        free.append(1024.0 * int(available.split()[0]))
    with contextlib.suppress(OSError, KeyError, ValueError):  # "max" where there is no limit
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
        taken = dict(line.split() for line in lines)
        limit = float(Path("/sys/fs/cgroup/memory.max").read_text())
        free.append(limit - int(taken["anon"]) - int(taken["shmem"]))
    return min(free)


def room_for(target: Llama, needs: Demand) -> tuple[float, float]:
    """Bytes that each process can use: on its device, the weights included, and in host memory."""
    ranks = target.execution.ranks
    on_host = ranks.least(free_host_bytes()) / ranks.count
    on_device = on_host
    if target.device.type == "cuda":
        # Memory that the allocator still keeps is in small blocks, of no use to large tensors.
        with WHOLE_DEVICE:
            torch.cuda.empty_cache()
        on_device = ranks.least(float(torch.cuda.mem_get_info(target.device)[0]))
    return on_device + needs.num_weight_bytes, on_host


def allocate_full_cache(target: Llama, needs: Demand, host: HostMemory | None = None) -> FullCache:
    """An empty full cache for `needs`, if need be partly in `host` memory. Raises `InputError`."""
    L = target.config.num_layers
    shape = needs.shape
    device = target.device
    on_chip = L
    size = (shape.num_rows, shape.capacity)
    host = host or HostMemory(device)
    try:
        if device.type == "cuda":
            on_device, on_host = room_for(target, needs)
            on_host += host.num_free_bytes
            on_chip = choose_on_chip(needs, on_device, on_host)
        elif shape.generation.offload:
            raise InputError("offload=True is for GPUs, and this is none; leave it out")
        if on_chip == L:
            return FullCache.allocate(target, *size, target.execution.make_slots or plain_slots)
        log.debug("KV cache: %d of %d layers are on %s", on_chip, L, device)
        return OffloadedFullCache(target, *size, on_chip=on_chip, host=host)
    except (RuntimeError, OSError):  # out of memory, on CUDA too
        raise InputError(
            f"the KV cache for {shape.num_rows} x {shape.capacity} tokens needs "
            f"{L * needs.kv_layer / 1e9:.1f} GB, which {device} does not have; shorten the prompt, "
            "lower max_new_tokens, or use a smaller dtype"
        ) from None


class MemoryPool:
    """Keeps caches and graphs of an engine's latest run for the next run."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.host = HostMemory(models.target.device)
        self.snapshot: HeldRow | None = None
        """K and V of a text from a file, for prompts that begin like that text."""
        self.store: Store | None = None
        self.runs: weakref.WeakSet[Any] = weakref.WeakSet()  # `Generation`s that use this pool
        self._kept: Memory | None = None
        self._latest: int | None = None
        """`id` of the latest run's memory, for `put`; a reference would keep it in memory."""

    def acquire(self, shape: MemoryShape, prompts: Sequence[list[int]]) -> Memory:
        """The latest run's memory if it serves this `shape`, else new memory. Raises `InputError`.
        K and V of old texts are copied there if one of `prompts` (token ids) begins like them."""
        kept = self._kept
        self._kept = self._latest = None
        if not kept or not self._can_run(kept, shape):
            full = kept.full if kept and fits(kept, shape) else None
            held = kept.prefix if kept and (full or is_worth_copying(kept, prompts)) else None
            kept = None  # frees the old memory before the new one is allocated
            kept = allocate(self.models, shape, full=full, held=held, host=self.host)
        kept.prefix.snapshot = self.snapshot
        kept.prefix.store = self.store
        self._latest = id(kept)
        return kept

    def fitting(self, shape: MemoryShape) -> MemoryShape:
        """A copy of the shape with as many of its first rows as fit into memory together."""
        needs = demand_of(self.models, shape)
        on_device, on_host = room_for(self.models.target, needs)
        on_host += self.host.num_free_bytes
        while shape.num_rows > 1 and not replace(needs, shape=shape).has_room(on_device, on_host):
            shape = replace(shape, prompt_lengths=shape.prompt_lengths[:-1])
        return shape

    def put(self, memory: Memory, *, was_interrupted: bool = False) -> None:
        """Takes back `memory` from the latest run, to keep it for the next one.
        A cache in host memory is not kept if the run `was_interrupted`, maybe in copies to it, or
        if the layers on the device were chosen for the lengths of this run."""
        generation = memory.shape.generation
        is_fitted = generation.on_chip is None and not generation.reserve
        is_spent = memory.full.is_hosted and (is_fitted or was_interrupted)
        if id(memory) == self._latest and not is_spent:
            self._kept = memory

    @property
    def held(self) -> HeldRow | None:
        """The longest ended text whose K and V are kept, else that of a snapshot file, if any."""
        return (self._kept and self._kept.prefix.longest) or self.snapshot

    def clear(self) -> None:
        """Frees all kept memory; the memory of runs in progress is freed when they end."""
        if self.store:
            self.store.close()
        self._kept = self.snapshot = self._latest = self.store = None
        self.host.clear()

    def _can_run(self, kept: Memory, new: MemoryShape) -> bool:
        """Whether the `kept` memory and its CUDA graphs can serve a run of the `new` shape."""
        old = kept.shape.speculation
        is_greedy = new.sampling.temperature == 0
        return (
            fits(kept, new)
            # No cache or graph depends on `coupled` or `timed`.
            and replace(new.speculation, coupled=old.coupled, timed=old.timed) == old
            and isinstance(old.policy, str)  # a user's policy object may have state of its run
            and (not kept.graphs or is_greedy or new.sampling.form == kept.shape.sampling.form)
            and new.generation.prefill_chunk <= kept.shape.generation.prefill_chunk
            and (not kept.retrieval_cache or max(new.budgets) <= max(kept.shape.budgets))
        )


def fits(kept: Memory, new: MemoryShape) -> bool:
    """Whether the `kept` full KV cache has the size and placement for a run of the `new` shape."""
    placement = operator.attrgetter(
        "num_rows", "generation.offload", "generation.on_chip", "generation.cuda_graphs"
    )
    return new.capacity <= kept.full.capacity and placement(new) == placement(kept.shape)


def is_worth_copying(kept: Memory, prompts: Sequence[list[int]]) -> bool:
    """Whether to copy kept texts to a larger cache: on a CPU, if a prompt (ids) begins like one."""
    is_cheap = kept.full.device.type != "cuda" and not kept.full.is_hosted
    return is_cheap and any(kept.prefix.num_shared(prompt) >= WORTH_COPYING for prompt in prompts)
