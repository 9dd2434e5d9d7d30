"""What a run reads with: the models and their caches, and on a GPU the passes captured over them.

All of it is memory of fixed shapes, in which nothing need stay of a run's texts. So on a GPU an engine puts it on a
`Shelf` when a run is over, and a later run of as many texts, of the same settings and not longer, uses it again and
captures nothing, whatever its texts, seeds, temperature, top-p or min-p. What makes it capture anew is another top-k,
or a filter that was off, or on, when it was captured: then logits become laws in other ways. (A greedy run may use what
was captured with filters, which work in vain then.)

Legend: L layers, B batch, T tokens of a block, H query heads, D head dim.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from minitri.model.attention import whole_strides
from minitri.caches.full import FullCache
from minitri.gpu.offloaded_cache import OffloadedFullCache
from minitri.caches.policies import make_policy
from minitri.caches.retrieval import RetrievalCache
from minitri.draft_runner import DraftReader
from minitri.errors import InputError
from minitri.gpu.graphs import GraphPool
from minitri.model.llama import Llama
from minitri.gpu.placement import choose_on_chip, demand, free_device_bytes, free_host_bytes
from minitri.runner import Reader
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig

log = logging.getLogger("minitri")

PADDED_BLOCKS = (5, 9)
"""Sizes between the smallest and the largest for which verification is captured, too, where gammas are open."""


class Readers:
    """The readers that the stages of `speculation` need, over one full cache."""

    def __init__(
        self,
        target: Llama,
        draft: Llama | None,
        full: FullCache,
        prompt_lengths: Sequence[int],
        sampling: SamplingParams,
        speculation: SpeculationConfig,
        graphs: GraphPool | None = None,
    ) -> None:
        """With `graphs`, forward passes are captured in blocks of a few sizes, but for those that stream KV from host
        memory."""
        config, plans, B = target.config, speculation.plans, len(prompt_lengths)
        self._models = target, draft
        methods = {plan.method for plan in plans}
        self.full = full
        self.capacity = full.capacity
        """Slots that this run has asked for; there may be more."""
        self.graphs = graphs
        self.speculation = speculation
        self.queries_LBTHD = torch.empty(
            config.num_layers, B, speculation.max_block, config.num_heads, config.head_dim,
            dtype=target.dtype, device=target.device,
        )  # fmt: skip
        """The target's, of its latest block."""
        self.draft: DraftReader | None = None
        self.small: RetrievalCache | None = None
        self.retrieval: Reader | None = None
        if draft is not None and methods & {"naive", "triforce"}:
            self.draft = DraftReader(
                draft, B, sampling, speculation, vocab_size=config.vocab_size, graphs=graphs
            )
        if methods & {"retrieval", "triforce"}:
            self.small = RetrievalCache(
                full, make_policy(speculation.policy, full, speculation.chunk_size), speculation,
                budgets=[speculation.budget_for(length) for length in prompt_lengths], num_heads=config.num_heads,
                max_budget=speculation.max_budget_for(prompt_lengths),
            )  # fmt: skip
            self.retrieval = Reader(
                target, self.small, sampling, vocab_size=config.vocab_size, graphs=graphs,
                block_sizes={1, 1 + max(plan.gamma1 for plan in plans)},
            )  # fmt: skip
            if isinstance(full, OffloadedFullCache):
                self._choose_while_staged(full, self.small)
        target_blocks = {1, speculation.max_block}
        if len(plans) > 1:  # short blocks are not padded to the longest of all plans
            target_blocks |= {size for size in PADDED_BLOCKS if size < speculation.max_block}
        self.target = Reader(
            target, full, sampling, vocab_size=config.vocab_size, queries_LBTHD=self.queries_LBTHD,
            graphs=graphs if full.on_chip == config.num_layers else None, block_sizes=target_blocks,
        )  # fmt: skip

    def _choose_while_staged(self, full: OffloadedFullCache, small: RetrievalCache) -> None:
        """The small cache holds the full one: nothing is to keep both alive when their run is over."""
        weak, queries_LBTHD = weakref.proxy(small), self.queries_LBTHD
        full.visitor = lambda layer, keys_BKSD, values_BKSD: weak.visit(
            queries_LBTHD, layer, keys_BKSD, values_BKSD
        )

    @property
    def num_cache_bytes(self) -> int:
        """Bytes of all caches."""
        small = self.small.num_bytes if self.small is not None else 0
        return (
            self.full.num_bytes
            + small
            + (self.draft.window.num_bytes if self.draft is not None else 0)
        )

    def suit(
        self,
        target: Llama,
        draft: Llama | None,
        prompt_lengths: Sequence[int],
        capacity: int,
        sampling: SamplingParams,
        speculation: SpeculationConfig,
    ) -> bool:
        """Whether a run over such prompts finds here all that it needs, rows of `capacity` tokens included."""
        return (
            target is self._models[0]
            and draft is self._models[1]
            and self.target.can_sample_by(sampling)
            and len(prompt_lengths) == self.full.shape[1]
            and capacity <= self.full.capacity
            and shapes_of(speculation) == shapes_of(self.speculation)
            and (self.small is None or self.small.holds(speculation.max_budget_for(prompt_lengths)))
        )

    def restart(
        self,
        prompt_lengths: Sequence[int],
        capacity: int,
        sampling: SamplingParams,
        speculation: SpeculationConfig,
    ) -> None:
        """Empties all caches for another run, which they suit."""
        self.full.reset()
        self.capacity = whole_strides(capacity)
        self.speculation = speculation
        if self.graphs is not None:
            self.graphs = copy.copy(self.graphs)  # the last run's statistics hold the other one
            self.graphs.capture_seconds = 0.0
        if self.small is not None:
            self.small.restart([speculation.budget_for(length) for length in prompt_lengths])
        if self.draft is not None:
            self.draft.window.crop([0] * len(prompt_lengths))
        for reader in (self.draft, self.retrieval, self.target):
            if reader is not None:
                reader.sample_by(sampling)


def shapes_of(speculation: SpeculationConfig) -> SpeculationConfig:
    """The settings, less those that readers take anew for every run."""
    return dataclasses.replace(speculation, coupled=False, timed=False)


class Shelf:
    """Holds the readers of the last run for the next one, on a GPU: there what has been captured is worth keeping."""

    def __init__(self) -> None:
        self._kept: Readers | None = None
        self._generation = GenerationConfig()
        self.ticket = 0
        """Of whoever has taken last, who alone may put something here: an older run may end at any time, or when it is
        collected."""

    def put(self, readers: Readers, generation: GenerationConfig, ticket: int) -> None:
        """Keeps them for the next run. How many layers fit on the device is for every run to find out."""
        is_fitted = isinstance(readers.full, OffloadedFullCache) and generation.on_chip is None
        if ticket == self.ticket and readers.graphs is not None and not is_fitted:
            self._kept, self._generation = readers, generation

    def clear(self) -> None:
        """Gives up what is kept; what is still in use will not be kept either."""
        self._kept = None
        self.ticket += 1

    def take(
        self,
        target: Llama,
        draft: Llama | None,
        prompt_lengths: Sequence[int],
        capacity: int,
        generation: GenerationConfig,
        sampling: SamplingParams,
        speculation: SpeculationConfig,
    ) -> Readers | None:
        """Empty readers for a run, if those kept suit it. If not they are given up, so that others find room."""
        kept = self._kept
        self.clear()
        same_place = all(
            getattr(generation, name) == getattr(self._generation, name)
            for name in ("offload", "on_chip", "cuda_graphs")
        )
        same_place &= generation.prefill_chunk <= self._generation.prefill_chunk
        if (
            kept is None
            or not same_place
            or not kept.suit(target, draft, prompt_lengths, capacity, sampling, speculation)
        ):
            return None
        kept.restart(prompt_lengths, capacity, sampling, speculation)
        return kept


def allocate_full_cache(
    target: Llama,
    draft: Llama | None,
    prompt_lengths: list[int],
    capacity: int,
    generation: GenerationConfig,
    speculation: SpeculationConfig,
) -> FullCache:
    """An empty full cache for rows of up to `capacity` tokens, on the device or partly in host memory.

    Raises `InputError` if there is no room for it and what else a run needs.
    """
    B, config, device = len(prompt_lengths), target.config, target.device
    settings: dict[str, Any] = {"dtype": target.dtype, "device": device}
    try:
        if device.type != "cuda":
            check_offload(target, generation)
            return FullCache.allocate(config, B, capacity, **settings)
        needs = demand(
            config, draft.config if draft else None, speculation, num_tokens=capacity,
            prompt_lengths=prompt_lengths, prefill_chunk=generation.prefill_chunk, itemsize=target.dtype.itemsize,
        )  # fmt: skip
        on_chip = choose_on_chip(
            needs, offload=generation.offload, on_chip=generation.on_chip, host_bytes=free_host_bytes(),
            device_bytes=free_device_bytes(device) + needs.weights + needs.draft_weights, name=config.name,
        )  # fmt: skip
        if on_chip == config.num_layers:
            return FullCache.allocate(config, B, capacity, **settings)
        log.info(
            "KV cache: %d of %d layers on %s, the others in host memory",
            on_chip,
            config.num_layers,
            device,
        )
        return OffloadedFullCache.allocate_offloaded(
            config, B, capacity, on_chip=on_chip, **settings
        )
    except RuntimeError:  # out of memory, on CUDA too
        needed = B * capacity * config.kv_values_per_token * target.dtype.itemsize
        raise InputError(
            f"the KV cache for {B} x {capacity} tokens needs {needed / 1e9:.1f} GB, which {device} does not have; "
            "shorten the prompt, lower max_new_tokens, or use a smaller dtype"
        ) from None


def check_offload(target: Llama, generation: GenerationConfig) -> None:
    """Raises `InputError` if the KV cache is wanted in host memory for a model that runs there."""
    if generation.offload and target.device.type != "cuda":
        raise InputError(
            f"offload is for GPUs: {target.config.name} runs on the {target.device.type}, whose KV cache is in host "
            "memory already; leave --offload out"
        )
