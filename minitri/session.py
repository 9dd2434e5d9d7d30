"""A session: models, caches and graphs of a run, and the cascade over them.

`Session(...)` allocates the caches for a batch of prompts, puts runners over them and, on a GPU,
captures their forward passes. `begin` starts a run in this memory; `prefill` reads the prompts
while the retrieval cache observes them; `cascade.start` and `cascade.step` make tokens. When the
run is over another one that fits may begin in the same memory (`reuse/pool.py`). Generation,
benchmarks and tests all use this class.

Legend: L layers, B batch, T tokens of a block, H query heads, D head dim.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.caches.policies import make_policy
from minitri.caches.prefixes import PrefixCache
from minitri.caches.retrieval import RetrievalCache
from minitri.caches.streaming import window_problem
from minitri.decoding.autotuner import Autotuner
from minitri.decoding.cascade import Cascade
from minitri.decoding.level import Emitted, Level, Stage
from minitri.decoding.random_source import CoupledSource, IndependentSource, RandomSource
from minitri.decoding.sampling import probs_of_rows
from minitri.drafters.lookup import LookupDrafter
from minitri.drafters.plugin import Drafter, PluggedDrafter
from minitri.errors import InputError, shorten
from minitri.events import Batch
from minitri.gpu.graphs import GraphPool, graph_pool
from minitri.gpu.offload.host_memory import HostMemory
from minitri.gpu.offload.offloaded_cache import OffloadedFullCache
from minitri.gpu.placement import allocate_full_cache
from minitri.gpu.streams import clock_of
from minitri.model.llama import Llama
from minitri.roofline import CPU, GPU, bytes_per_pass, pass_costs
from minitri.runner import DraftRunner, ModelRunner, RetrievalRunner, prefill
from minitri.settings import SamplingParams
from minitri.stats import LevelStats, Stats
from minitri.trees.level import TreeLevel
from minitri.trees.random_source import CoupledTrees, IndependentTrees
from minitri.trees.tuner import TreeTuner

log = logging.getLogger("minitri")

PADDED_BLOCKS = (5, 9)
"""Block sizes that are captured beside the smallest and the largest, where gammas are open."""

CHAINS = Autotuner, Level, IndependentSource, CoupledSource
TREES = TreeTuner, TreeLevel, IndependentTrees, CoupledTrees


class Session:
    """Everything that a run over a batch of prompts computes with."""

    full: FullCache
    retrieval_cache: RetrievalCache | None = None
    draft: DraftRunner | None = None
    retrieval: RetrievalRunner | None = None
    target: ModelRunner
    cascade: Cascade
    source: IndependentSource | CoupledSource
    stats: Stats
    number: int = 0  # of the run, for the pool
    is_broken: bool = False  # interrupted in the middle of a step: only its full cache is of use

    def __init__(
        self,
        target: Llama,
        draft: Llama | None,
        batch: Batch,
        *,
        guesser: Llama | None = None,
        drafter: Drafter | None = None,
        full: FullCache | None = None,
        held: PrefixCache | None = None,
        graphs: GraphPool | None = None,
        host: HostMemory | None = None,
    ) -> None:
        """Allocates and captures for batches of this shape; `begin` must follow.

        `drafter` guesses in the place of a `draft` model; without either the last words are looked
        up in the text. `guesser`, a rough copy of the target, takes its place at the retrieval
        level. `host` lends memory for K
        and V. `held` are texts that an earlier session leaves, in `full` or in another full cache.
        By default the full cache goes where it fits, and passes are captured on a GPU, but for
        those that stream K and V from host memory. Raises `InputError` if there is no room.
        """
        uses_drafter = any(plan.uses_drafter for plan in batch.speculation.plans)
        if batch.speculation.drafter == "lookup" or not uses_drafter:
            draft = None
        if draft is not None and (problem := window_problem(draft.config, batch.speculation)):
            if batch.speculation.method != "auto":
                raise InputError(problem)
            log.warning("%s; suffix lookup takes its place", problem)
            draft = None
        self.models, self.guesser = (target, draft), guesser or target
        self._drafter = drafter
        self.shape = batch  # what the memory was made for
        self.full = full if full is not None else allocate_full_cache(
            target, draft.config if draft is not None else None, batch.generation,
            batch.speculation, batch.most_lengths, batch.capacity, host,
        )  # fmt: skip
        self.prefix = PrefixCache(
            self.full, batch.speculation.max_block, reads_alike=not target.is_row_invariant
        )
        if held is not None:  # before captures write to the slots of rows without a text
            self.prefix.adopt(held)
        if graphs is None:
            graphs = graph_pool(target.device, wanted=batch.generation.cuda_graphs)
        self.graphs = graphs
        try:
            self._make_runners(batch)
        except RuntimeError as error:  # out of memory, on CUDA too
            raise InputError(
                f"the small KV caches do not fit on {target.device} beside the full one "
                f"({shorten(error, 90)}); lower budget or num_recent_tokens, or shorten the prompt"
            ) from None

    def _make_runners(self, batch: Batch) -> None:
        """The runners that the stages of `batch.speculation` need, over one full cache."""
        (target, draft), speculation, sampling = self.models, batch.speculation, batch.sampling
        config, plans, B = target.config, speculation.plans, len(batch.prompts)
        shape = (config.num_layers, B, speculation.max_block, config.num_heads, config.head_dim)
        # Rotated queries of the target's latest block: a rebuild needs no pass of its own.
        self.queries_LBTHD = torch.empty(shape, dtype=target.dtype, device=target.device)
        common: dict[str, Any] = {"vocab_size": config.vocab_size, "graphs": self.graphs}
        if draft is not None:
            self.draft = DraftRunner(draft, B, sampling, speculation, **common)
        if any(plan.uses_retrieval for plan in plans):
            policy = make_policy(speculation.policy, self.full, speculation.chunk_size)
            self.retrieval_cache = RetrievalCache(
                self.full, policy, speculation, num_heads=config.num_heads,
                budgets=[batch.budget_for(length) for length in batch.most_lengths],
            )  # fmt: skip
            sizes = {1, 1 + max(plan.gamma1 for plan in plans)}
            self.retrieval = RetrievalRunner(
                self.guesser, self.retrieval_cache, sampling, self.queries_LBTHD, block_sizes=sizes,
                **common,
            )  # fmt: skip
            if isinstance(self.full, OffloadedFullCache):
                self.full.rebuild_while_staged(self.retrieval_cache, self.queries_LBTHD)
        sizes = {1, speculation.max_block}
        if len(plans) > 1:  # short blocks are not padded to the longest of all plans
            sizes |= {size for size in PADDED_BLOCKS if size < speculation.max_block}
        if self.full.on_chip < config.num_layers:
            common["graphs"] = None
        self.target = ModelRunner(
            target, self.full, sampling, queries_LBTHD=self.queries_LBTHD, block_sizes=sizes,
            **common,
        )  # fmt: skip

    @property
    def runners(self) -> list[ModelRunner]:
        """Those that there are."""
        return [it for it in (self.draft, self.retrieval, self.target) if it is not None]

    @property
    def num_cache_bytes(self) -> int:
        """Bytes of all caches."""
        caches = (self.full, self.retrieval_cache, self.draft.cache if self.draft else None)
        return sum(cache.num_bytes for cache in caches if cache is not None)

    def begin(self, batch: Batch, sources: Mapping[str, RandomSource] | None = None) -> None:
        """Empties all caches and stacks the stages for a run over `batch`.

        `sources` replaces the random sources of the named stages: for made-up verdicts.
        """
        self.batch = batch
        self.sequences = [list(prompt) for prompt in batch.prompts]
        self.prefix.num_prompt = batch.lengths
        for b in range(len(batch.prompts)):
            self.full.reset(b)
            if self.draft is not None:
                self.draft.reset(b)
        self.prefix.note_certain()
        stats = Stats(kv_cache_bytes=self.num_cache_bytes)
        if self.retrieval_cache is not None:
            self.retrieval_cache.restart(batch.budgets)
            stats.rebuilds = self.retrieval_cache.rebuilds
        stats.rebuilds.clock = clock_of(self.models[0].device)
        for runner in self.runners:
            runner.sample_by(batch.sampling)
        if self.graphs is not None:
            stats.num_graphs, stats.graph_bytes = self.graphs.num_graphs, self.graphs.num_bytes
            stats.capture_seconds, self.graphs.capture_seconds = self.graphs.capture_seconds, 0.0
        self.stats = stats
        self.cascade = self._stack(batch, sources)

    def admit(
        self, b: int, prompt: list[int], seed: int, sampling: SamplingParams,
        *, speculation: bool = True,
    ) -> None:  # fmt: skip
        """Gives row b, which is empty, to another text, for which nothing is guessed without
        `speculation`; `prefill` and `start` must follow."""
        self.sequences[b][:], self.prefix.num_prompt[b] = prompt, len(prompt)
        self.cascade.active[b], self.cascade.guessing[b] = False, speculation
        self.source.restart(b, seed)
        if self.retrieval_cache is not None:
            self.retrieval_cache.reset(b, self.batch.budget_for(len(prompt)))
        for runner in self.runners:
            runner.sample_by(sampling, b)

    @property
    def samples_alike(self) -> bool:
        """Whether all rows must have the same filters: those of captured steps."""
        return any(runner.captured is not None for runner in self.runners)

    def reuse(self, b: int) -> int:
        """Begins the text of row b with the K and V of its first tokens that other texts left, if
        any; returns how many.

        The last tokens are always read: their queries choose what the retrieval cache holds.
        """
        prompt, cache = self.sequences[b], self.retrieval_cache
        most = len(prompt) - 1 - self.batch.speculation.observation_window * (cache is not None)
        if cache is not None and cache.max_prompt_queries is None:
            most = 0  # its policy must see all of them
        num_tokens = self.prefix.take(b, self.sequences, most)
        if cache is not None:
            cache.reset(b, self.batch.budget_for(len(prompt)), num_tokens)
        return num_tokens

    def retire(self, b: int) -> None:
        """Ends the text of row b; the next ones may begin with what it leaves in the full cache."""
        self.prefix.keep(b, self.sequences[b])
        self.cascade.retire(b)

    def _stack(self, batch: Batch, sources: Mapping[str, RandomSource] | None) -> Cascade:
        """The stages of the batch's method over this session's runners."""
        plans, follow = batch.speculation.plans, self.models[0].ranks.follow_first
        clock = self.stats.rebuilds.clock
        make_tuner, make_level, independent, coupled = TREES if batch.speculation.tree else CHAINS
        tuner = follow(make_tuner(plans, self._prior_seconds(), use_clock=self._may_use_clock()))
        by_token = independent(batch.seeds, batch.speculation.verification)
        self.source = follow(coupled(batch.seeds) if batch.speculation.coupled else by_token)

        def level(
            name: str, runner: ModelRunner, on_not_finite: Callable[[], None] | None = None
        ) -> Level:
            self.stats.stages.append(LevelStats(name))
            own = (sources or {}).get(name, self.source)
            return make_level(runner, own, self.stats.stages[-1], tuner, on_not_finite, clock)

        drafter: Stage | None = None
        if self.draft is not None:
            drafter = level("draft", self.draft, self.draft.warn)
        elif any(plan.uses_drafter for plan in plans):
            self.stats.stages.append(LevelStats("draft"))
            drafter = self._without_model(batch, tuner)
        retrieval = level("retrieval", self.retrieval) if self.retrieval is not None else None
        target = level("target", self.target)
        return Cascade(self.sequences, self.stats, tuner, target, retrieval, drafter, clock)

    def _without_model(self, batch: Batch, tuner: Autotuner) -> Stage:
        """The engine's drafter from outside, or lookup."""
        target, stats = self.models[0], self.stats.stages[-1]
        where: dict[str, Any] = {"vocab_size": target.config.vocab_size, "device": target.device}
        if self._drafter is None or batch.speculation.drafter == "lookup":
            return LookupDrafter(len(batch.prompts), stats, tuner, **where)

        def filtered(logits_BNV: Tensor) -> Tensor:
            return probs_of_rows(logits_BNV, self.target._sampling)

        return PluggedDrafter(self._drafter, stats, tuner, self.source, filtered, **where)

    def _prior_seconds(self) -> Callable[[str, float], float]:
        """What a round of each stage takes by bytes over bandwidth, before it was measured."""
        target = self.models[0]
        return pass_costs(
            target.config, self.draft.model.config if self.draft is not None else None,
            machine=GPU if target.device.type == "cuda" else CPU, itemsize=target.dtype.itemsize,
            target_bytes=bytes_per_pass(target), guesser_bytes=bytes_per_pass(self.guesser),
            num_tokens=sum(self.batch.lengths),
            num_retrieved=sum(self.batch.budgets) if self.retrieval_cache is not None else 0,
            hosted_share=1 - self.full.on_chip / target.config.num_layers,
            batch_size=len(self.batch.prompts),
        )  # fmt: skip

    def _may_use_clock(self) -> bool:
        """Whether the autotuner may follow measured times: if all plans write the same text.

        Unless it is row-invariant, the length of a block may decide a near-tie in other dtypes than
        float32, and on a GPU.
        """
        target, batch = self.models[0], self.batch
        is_same_text = batch.speculation.coupled or batch.sampling.temperature == 0
        is_float32 = target.dtype == torch.float32 and target.device.type == "cpu"
        # The slots of a path, and so the order in which attention adds, depend on the tree.
        is_exact = is_float32 or (target.is_row_invariant and not batch.speculation.tree)
        return batch.speculation.timed or (is_same_text and is_exact)

    def start(self, rows: list[int]) -> list[Emitted]:
        """The first tokens of rows whose prompts have been read."""
        with self.models[0].decoding():
            emitted = self.cascade.start(rows)
        self.prefix.note_certain()
        return emitted

    def step(self) -> list[Emitted]:
        """A step of the cascade; a CPU gives its cores to the kernels meanwhile."""
        with self.models[0].decoding():
            emitted = self.cascade.step()
        self.prefix.note_certain()
        return emitted

    def prefill(self, b: int) -> Iterator[int]:
        """Reads the prompt of row b but for its last token in chunks; yields how many tokens it has
        read."""
        self.stats.num_prompt_tokens += len(self.sequences[b])
        cache = self.retrieval_cache
        for num_read in prefill(
            self.models[0], self.sequences[b], self.full, b,
            chunk=self.batch.generation.prefill_chunk,
            watch=functools.partial(cache.observe, b) if cache is not None else None,
            max_queries=cache.max_prompt_queries if cache is not None else None,
        ):  # fmt: skip
            self.prefix.note_certain()
            yield num_read
