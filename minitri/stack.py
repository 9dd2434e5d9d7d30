"""A run over a memory: the texts of its rows, and the stages of the cascade that extends them.

`admit` gives a row to a text, which is the only way a text starts; `prefill` reads its prompt while
the retrieval cache observes it; `start` and `step` make tokens; `retire` ends it. What the
autotuner expects of a round before any was measured, and when it may follow the clock, is decided
here.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from minitri.decoding.autotuner import Autotuner
from minitri.decoding.cascade import Cascade
from minitri.decoding.level import Emitted, Level, Stage
from minitri.decoding.meter import Meter
from minitri.decoding.random_source import CoupledSource, IndependentSource, RandomSource
from minitri.decoding.verification import run_now
from minitri.drafters.lookup import LookupDrafter
from minitri.drafters.plugin import PluggedDrafter
from minitri.gpu.graphs import GraphPool
from minitri.gpu.streams import clock_of
from minitri.memory import Memory, MemoryShape, Models, allocate
from minitri.requests import Request
from minitri.roofline import CPU, GPU, Workload, bytes_per_pass
from minitri.runner import CapturedDraft, DraftRunner, ModelRunner, prefill
from minitri.settings import SpeculationConfig
from minitri.stats import LevelStats, Stats
from minitri.trees.tree_level import TreeLevel, TreeRunner
from minitri.trees.walk import CoupledTrees, IndependentTrees


class Stack:
    """The texts of a run, and the cascade that extends them."""

    def __init__(
        self, memory: Memory, shape: MemoryShape, sources: Mapping[str, RandomSource] | None = None
    ) -> None:
        """The memory must fit the `shape` of the run; no row of it has a text.

        `sources` replaces the random sources of the named stages: to simulate acceptance.
        """
        self.memory = memory
        self.shape = shape
        self.sequences: list[list[int]] = [[] for _ in shape.prompt_lengths]
        num_graphs = memory.graphs.num_graphs if memory.graphs is not None else 0
        self.stats = Stats(kv_cache_bytes=memory.num_cache_bytes, num_graphs=num_graphs)
        if memory.retrieval_cache is not None:
            memory.retrieval_cache.num_rebuilds = 0
        self.tuner = Autotuner(
            shape.speculation.plans,
            prior_seconds(memory, shape),
            use_clock=may_use_clock(memory.models, shape),
        )
        self.source = _random_source(shape.speculation, memory.graphs)
        self.meter = Meter(self.stats, self.tuner, clock_of(memory.models.target.device))
        self.cascade = self._cascade(sources or {})

    def _cascade(self, sources: Mapping[str, RandomSource]) -> Cascade:
        """The stages over the runners of the memory, from the lowest upwards."""
        memory = self.memory

        def level(name: str, runner: ModelRunner) -> Level:
            stats = LevelStats(name)
            self.stats.stages.append(stats)
            own: Any = sources.get(name, self.source)
            if self.shape.speculation.tree:
                return TreeLevel(runner, own, stats, self.meter, TreeRunner(runner))
            if isinstance(runner, DraftRunner) and runner.graphs is not None:
                return CapturedDraft(runner, own, stats, self.meter)
            return Level(runner, own, stats, self.meter)

        drafter: Stage | None = None
        if memory.draft is not None:
            drafter = level("draft", memory.draft)
        elif any(plan.uses_drafter for plan in self.shape.speculation.plans):
            drafter = self._without_model()
        retrieval = level("retrieval", memory.retrieval) if memory.retrieval is not None else None
        target = level("target", memory.target)
        return Cascade(self.sequences, self.meter, target, retrieval, drafter)

    def _without_model(self) -> Stage:
        """The engine's drafter from outside, or lookup."""
        models = self.memory.models
        stats = LevelStats("draft")
        self.stats.stages.append(stats)
        target = models.target
        where: dict[str, Any] = {"vocab_size": target.config.vocab_size, "device": target.device}
        if models.drafter is None:
            return LookupDrafter(self.shape.num_rows, stats, self.meter, **where)
        runner = self.memory.target
        return PluggedDrafter(models.drafter, stats, self.meter, self.source, runner, **where)

    def admit(self, b: int, prompt: list[int], request: Request) -> None:
        """Gives row b, which is empty, to a request; `prefill` and `start` must follow."""
        memory = self.memory
        self.sequences[b][:] = prompt
        self.cascade.active[b] = False
        self.cascade.guessing[b] = request.speculation
        self.source.restart(b, request.seed)
        if memory.retrieval_cache is not None:
            memory.retrieval_cache.reset(b, self.shape.budget_for(len(prompt)))
        for runner in memory.runners:
            runner.sample_by(b, request.sampling)

    def prefill(self, b: int) -> Iterator[int]:
        """Reads the prompt of row b; yields how many of its tokens are there: at first those whose
        K and V other texts left, then after every chunk; at the end all, of which `start` reads
        the last one."""
        memory = self.memory
        cache = memory.retrieval_cache
        prompt = self.sequences[b]
        self.stats.num_prompt_tokens += len(prompt)
        last = most = len(prompt) - 1
        watch = max_queries = None
        if cache is not None:
            watch = functools.partial(cache.observe, b)
            max_queries = cache.max_prompt_queries
            # What is always read: tokens whose queries choose what the retrieval cache holds.
            most = 0 if max_queries is None else last - max_queries
        yield memory.prefix.take(b, self.sequences, most)
        chunk = self.shape.generation.prefill_chunk
        where = (memory.models.target, prompt, memory.full, b)
        for num_read in prefill(*where, chunk=chunk, watch=watch, max_queries=max_queries):
            memory.prefix.note_certain()
            if num_read < last:
                yield num_read
        yield len(prompt)

    def start(self, rows: list[int] | None = None, *, wants_logits: bool = False) -> list[Emitted]:
        """The first tokens of rows whose prompts have been read, or of all."""
        with self._decoding():
            return self.cascade.start(rows, wants_logits=wants_logits)

    def step(self, *, wants_logits: bool = False) -> list[Emitted]:
        """A step of the cascade."""
        with self._decoding():
            return self.cascade.step(wants_logits=wants_logits)

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        """A CPU gives its cores to the kernels meanwhile."""
        memory = self.memory
        with memory.models.target.execution.decoding():
            yield
        memory.prefix.note_certain()
        if memory.retrieval_cache is not None:
            self.stats.num_rebuilds = memory.retrieval_cache.num_rebuilds

    def retire(self, b: int) -> None:
        """Ends the text of row b; the next ones may begin with what it leaves in the full cache."""
        self.memory.prefix.keep(b, self.sequences[b])
        self.cascade.retire(b)


def begin(
    models: Models,
    requests: Sequence[Request],
    speculation: SpeculationConfig,
    *,
    sources: Mapping[str, RandomSource] | None = None,
    **memory: Any,
) -> Stack:
    """A stack over memory of its own, one row for each request, whose prompts are token ids: a run
    without text and events, for measurements. `memory` is passed to `allocate`."""
    first = requests[0]
    prompts = [[int(token) for token in it.prompt] for it in requests]
    lengths = tuple(len(prompt) for prompt in prompts)
    shape = MemoryShape(lengths, first.sampling, first.generation, speculation)
    stack = Stack(allocate(models, shape, **memory), shape, sources)
    for b, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        stack.admit(b, prompt, request)
    return stack


def _random_source(
    speculation: SpeculationConfig, graphs: GraphPool | None
) -> IndependentSource | CoupledSource:
    """Where random numbers come from; `restart` gives each row its seed."""
    run = run_now if graphs is None else graphs.run
    if speculation.coupled:
        return CoupledTrees(run=run) if speculation.tree else CoupledSource(run=run)
    make = IndependentTrees if speculation.tree else IndependentSource
    return make(kind=speculation.verification, run=run)


def prior_seconds(memory: Memory, shape: MemoryShape) -> Callable[[str, float], float]:
    """What a round of each stage takes by bytes over bandwidth, before it was measured."""
    models = memory.models
    target = models.target
    least = target.execution.ranks.least  # shares may be uneven
    work = Workload(
        target.config,
        memory.draft.model.config if memory.draft is not None else None,
        itemsize=target.dtype.itemsize,
        target_bytes=int(least(bytes_per_pass(target))),
        retrieval_bytes=int(least(bytes_per_pass(models.retrieval))),
        num_tokens=sum(shape.prompt_lengths),
        num_retrieved=sum(shape.budgets),
        hosted_share=1 - memory.full.on_chip / target.config.num_layers,
        batch_size=shape.num_rows,
    )
    machine = GPU if target.device.type == "cuda" else CPU
    return functools.partial(work.seconds, machine)


def may_use_clock(models: Models, shape: MemoryShape) -> bool:
    """Whether the autotuner may follow measured times: if all plans write the same text, or if
    `timed` accepts that they may not.

    Unless the model is row-invariant, the length of a block may decide a near-tie in other dtypes
    than float32, and on a GPU. Ranks that compute one model together must make equal choices.
    """
    target = models.target
    speculation = shape.speculation
    if target.execution.ranks.count > 1:
        return False
    is_same_text = speculation.coupled or shape.sampling.temperature == 0
    is_float32 = target.dtype == torch.float32 and target.device.type == "cpu"
    # The slots of a path, and so the order in which attention adds, depend on the tree.
    is_exact = (is_float32 or target.execution.is_row_invariant) and not speculation.tree
    return speculation.timed or (is_same_text and is_exact)
