"""From settings to a working cascade: which stages there are, with which model and cache.

`build_cascade` knows every part. While tokens are made, `Stages` stacks them as the tuner says, and is the one place in
which all caches take over what a step has made certain.

Legend: L layers, B batch, T tokens of a block, H query heads, D head dim.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.caches.offloaded import OffloadedFullCache
from minitri.caches.policies import make_policy
from minitri.caches.retrieval import RetrievalCache
from minitri.cascade import Cascade, Emitted, Level, Stage
from minitri.coins import Coins, CoupledCoins, IndependentCoins
from minitri.drafters.model import DraftReader
from minitri.drafters.ngram import NgramDrafter
from minitri.errors import InputError
from minitri.graphs import GraphPool
from minitri.model import Llama
from minitri.placement import choose_on_chip, demand, free_device_bytes, free_host_bytes
from minitri.reader import Reader
from minitri.settings import GenerationConfig, Plan, SamplingParams, SpeculationConfig
from minitri.stats import LevelStats, Stats
from minitri.tuning import Tuner, nominal_costs

log = logging.getLogger("minitri")

PADDED_BLOCKS = (5, 9)
"""Sizes between the smallest and the largest for which verification is captured, too, where gammas are open."""


class Stages:
    """The stages there are, and how they are stacked for the next step; a `Cascade` calls `steer` before every step.

    Also the place in which all caches take over what a step has made certain: a `Cascade` calls `commit` after it.
    """

    def __init__(
        self,
        sequences: list[list[int]],
        queries_LBTHD: Tensor,
        stats: Stats,
        tuner: Tuner,
        budgets: list[list[int]],
        *,
        target: Level,
        retrieval: Level | None,
        drafter: Level | NgramDrafter | None,
        retrieval_cache: RetrievalCache | None,
        draft_reader: DraftReader | NgramDrafter | None,
    ) -> None:
        self._sequences = sequences
        self._queries_LBTHD = queries_LBTHD
        self._stats = stats
        self._tuner = tuner
        self._budgets = {sum(rows): rows for rows in budgets}  # the tuner speaks of sums
        self._target = target
        self._retrieval = retrieval
        self._drafter = drafter
        self._retrieval_cache = retrieval_cache
        self._draft_reader = draft_reader
        self._stack(tuner.plan)

    def steer(self, active: list[bool]) -> None:
        """Stacks the stages, and sizes the retrieval cache, as the tuner says."""
        if not all(active):  # a stage that takes part again may not know yet that a row has ended
            lengths = [len(sequence) if on else 0 for sequence, on in zip(self._sequences, active, strict=True)]
            for stage in (self._retrieval, self._drafter):
                if stage is not None:
                    stage.forget(lengths)
        had_drafter = self._uses_drafter
        plan = self._tuner.choose()
        self._stats.steps_per_plan[str(plan)] = self._stats.steps_per_plan.get(str(plan), 0) + 1
        self._stats.break_even = self._tuner.break_even()
        if self._retrieval_cache is not None:
            self._retrieval_cache.resize(self._budgets[self._tuner.budget])
        self._stack(plan)
        if self._uses_drafter and not had_drafter and self._draft_reader is not None:
            self._draft_reader.commit(self._sequences, active)  # it has not followed the steps without it

    def commit(self, emitted: list[Emitted], active: list[bool]) -> None:
        """The small caches take over the exact K and V of the tokens that the last level let stand."""
        started = time.perf_counter()
        cache = self._retrieval_cache
        before = cache.rebuild_seconds if cache else 0.0
        if cache:
            for b, row in enumerate(emitted):
                if active[b]:
                    # The block was the token before, and the guesses; its first len(row.tokens) inputs stay.
                    queries_LTHD = self._queries_LBTHD[:, b, : len(row.tokens)]
                    was_rejected = row.origins[-1] == "recovered"
                    by_cache = self._target.below is self._retrieval
                    cache.commit(b, queries_LTHD, was_rejected=was_rejected, has_guessed=by_cache)
            self._stats.num_rebuilds = cache.num_rebuilds
            self._stats.budgets = list(cache.budgets) if len(self._budgets) > 1 else []
        if self._uses_drafter and self._draft_reader is not None:
            self._draft_reader.commit(self._sequences, active)
        rebuild_seconds = cache.rebuild_seconds - before if cache else 0.0
        self._stats.rebuild_seconds += rebuild_seconds
        self._stats.commit_seconds += time.perf_counter() - started - rebuild_seconds

    def _stack(self, plan: Plan) -> None:
        self._uses_drafter = plan.method in ("naive", "triforce")
        below: Stage | None = None
        if self._uses_drafter:
            assert self._drafter is not None
            below = self._drafter
            below.block = plan.gamma1
        if plan.method in ("retrieval", "triforce"):
            assert self._retrieval is not None
            self._retrieval.below, self._retrieval.block = below, plan.gamma2
            below = self._retrieval
        self._target.below = below


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
        log.info("KV cache: %d of %d layers on %s, the others in host memory", on_chip, config.num_layers, device)
        return OffloadedFullCache.allocate_offloaded(config, B, capacity, on_chip=on_chip, **settings)
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


def build_cascade(
    target: Llama,
    draft: Llama | None,
    full: FullCache,
    sequences: list[list[int]],
    seeds: list[int],
    sampling: SamplingParams,
    speculation: SpeculationConfig,
    stats: Stats,
    graphs: GraphPool | None = None,
    coins_of: Mapping[str, Coins] | None = None,
) -> tuple[Cascade, RetrievalCache | None]:
    """The stages of `speculation.method` over an empty full cache; without a `draft` model n-grams are the drafter.

    With `graphs`, forward passes are captured in blocks of a few sizes, but for those that stream KV from host memory.
    `coins_of`, by the name of a stage, is for benchmarks with made-up verdicts (`dummy.py`).

    `sequences` are the prompts, which the cascade extends in place. The retrieval cache, if there is one, is to observe
    the prompt while it is read.
    """
    B, config, plans = len(sequences), target.config, speculation.plans
    methods = {plan.method for plan in plans}
    coins: Coins = CoupledCoins(seeds) if speculation.coupled else IndependentCoins(seeds)
    coins_of = coins_of or dict.fromkeys(("draft", "retrieval", "target"), coins)
    drafter: Level | NgramDrafter | None = None
    draft_reader: DraftReader | NgramDrafter | None = None
    retrieval: Level | None = None
    cache: RetrievalCache | None = None
    lengths, chunk = list(map(len, sequences)), speculation.chunk_size
    most = -(-full.capacity // chunk) * chunk  # no row can fill more
    choice = [[min(budget, most) for budget in rows] for rows in speculation.budgets_for(lengths)]
    budgets = [min(speculation.budget_for(length), most) for length in lengths]
    stats.kv_cache_bytes = full.num_bytes
    stats.graphs = graphs
    if methods & {"naive", "triforce"}:
        stats.stages.append(LevelStats("draft"))
        if draft is None:
            drafter = draft_reader = NgramDrafter(
                B, 1, stats.stages[-1], vocab_size=config.vocab_size, device=target.device
            )
        else:
            draft_reader = DraftReader(draft, B, sampling, speculation, vocab_size=config.vocab_size, graphs=graphs)
            drafter = Level(draft_reader, None, coins_of["draft"], stats.stages[-1], block=1)
            stats.kv_cache_bytes += draft_reader.window.num_bytes
    if methods & {"retrieval", "triforce"}:
        policy = make_policy(speculation.policy, full, speculation.chunk_size)
        cache = RetrievalCache(
            full, policy, speculation, budgets=budgets, num_heads=config.num_heads, max_budget=max(map(max, choice))
        )  # fmt: skip
        block_sizes = {1, 1 + max(plan.gamma1 for plan in plans)}
        reader = Reader(
            target, cache, sampling, vocab_size=config.vocab_size, graphs=graphs, block_sizes=block_sizes
        )  # fmt: skip
        stats.stages.append(LevelStats("retrieval"))
        retrieval = Level(reader, None, coins_of["retrieval"], stats.stages[-1], block=1)
        stats.kv_cache_bytes += cache.num_bytes
    queries_LBTHD = torch.empty(
        config.num_layers, B, speculation.max_block, config.num_heads, config.head_dim,
        dtype=target.dtype, device=target.device,
    )  # fmt: skip
    if cache is not None and isinstance(full, OffloadedFullCache):
        small = weakref.proxy(cache)  # which holds the full cache: nothing is to keep both alive when their run is over
        full.visitor = lambda layer, keys_BKSD, values_BKSD: small.visit(queries_LBTHD, layer, keys_BKSD, values_BKSD)
    stats.stages.append(LevelStats("target"))
    target_blocks = {1, speculation.max_block}
    if len(plans) > 1:  # short blocks are not padded to the longest of all plans
        target_blocks |= {size for size in PADDED_BLOCKS if size < speculation.max_block}
    reader = Reader(
        target, full, sampling, vocab_size=config.vocab_size, queries_LBTHD=queries_LBTHD,
        graphs=graphs if full.on_chip == config.num_layers else None, block_sizes=target_blocks,
    )  # fmt: skip
    top = Level(reader, None, coins_of["target"], stats.stages[-1], block=1)
    one_text = (speculation.coupled or sampling.temperature == 0) and target.dtype == torch.float32
    may_watch_clock = speculation.timed or one_text  # in fewer bits a block's length may decide a near-tie
    hosted = 1 - full.on_chip / config.num_layers
    nominal = nominal_costs(target, draft, sum(lengths), hosted)
    tuner = Tuner(
        stats.stages, plans, nominal, timed=may_watch_clock, budgets=list(map(sum, choice)), budget=sum(budgets)
    )  # fmt: skip
    stages = Stages(
        sequences, queries_LBTHD, stats, tuner, choice,
        target=top, retrieval=retrieval, drafter=drafter, retrieval_cache=cache, draft_reader=draft_reader,
    )  # fmt: skip
    return Cascade(top, sequences, stages.commit, stages.steer), cache
