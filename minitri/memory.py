"""What a run computes with, allocated once: caches, runners over them, captured graphs.

`allocate` reads as the boot order. A `Memory` is frozen and holds no text: `stack.py` puts the
stages of a step over it, and another run that fits may take it over (`pool.py`).

Legend: L layers, B rows, T tokens of a block, H query heads, D head dim.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minitri.caches.full import FullCache
from minitri.caches.policies import make_policy
from minitri.caches.prefixes import PrefixCache
from minitri.caches.retrieval import RetrievalCache
from minitri.caches.streaming import StreamingCache
from minitri.drafters.plugin import Drafter
from minitri.errors import InputError, shorten
from minitri.gpu.allocation import allocate_full_cache
from minitri.gpu.graphs import GraphPool, graph_pool
from minitri.gpu.offload.host_memory import HostMemory
from minitri.gpu.offload.offloaded_cache import OffloadedFullCache
from minitri.model.cache import round_up_to_stride
from minitri.model.llama import Llama
from minitri.runner import DraftRunner, ModelRunner, RetrievalRunner, empty_queries
from minitri.settings import LONGEST_BLOCK, GenerationConfig, SamplingParams, SpeculationConfig

TARGET_BLOCKS = (1, 5, 9, LONGEST_BLOCK)
"""Block sizes for which passes of the target are captured, as far as a run has blocks that long;
short ones need not be padded to the longest of all plans."""


@dataclass(frozen=True, eq=False)
class Models:
    """The models of an engine."""

    target: Llama
    retrieval: Llama
    """Guesses with the retrieval cache: the target, or a copy of it in fewer bits."""
    draft: Llama | None = None
    drafter: Drafter | None = None
    """Guesses in the place of a draft model; without both the last words are looked up."""


@dataclass(frozen=True)
class MemoryShape:
    """What a run needs memory for."""

    prompt_lengths: tuple[int, ...]
    """Tokens of the longest prompt of each row; as many rows as texts run at a time."""
    sampling: SamplingParams
    """The filters that captured steps apply."""
    generation: GenerationConfig
    speculation: SpeculationConfig

    @property
    def num_rows(self) -> int:
        return len(self.prompt_lengths)

    @property
    def reserved_lengths(self) -> list[int]:
        """Tokens of the longest text, or prompt, that each row must have room for, now or later."""
        return [max(length, self.generation.reserve) for length in self.prompt_lengths]

    @property
    def capacity(self) -> int:
        """Slots that each row needs: prompt, output, and the guesses of the last step."""
        num_tokens = max(self.prompt_lengths) + self.generation.max_new_tokens
        return max(num_tokens, self.generation.reserve) + self.speculation.max_block - 1

    @property
    def budgets(self) -> list[int]:
        """Tokens in the retrieval cache of each row."""
        return [self.budget_for(length) for length in self.prompt_lengths]

    def budget_for(self, length: int) -> int:
        """The budget for a prompt of this length: never more than a text here can fill."""
        unit = self.speculation.chunk_size
        slots = round_up_to_stride(self.capacity)
        return min(self.speculation.budget_for(length), -(-slots // unit) * unit)


@dataclass(frozen=True, eq=False)
class Memory:
    """Caches, runners and captured graphs of a run."""

    models: Models
    shape: MemoryShape
    """What it was made for."""
    full: FullCache
    prefix: PrefixCache
    """What the rows of the full cache still hold of texts that have ended."""
    target: ModelRunner
    retrieval: RetrievalRunner | None
    draft: DraftRunner | None
    graphs: GraphPool | None

    @property
    def retrieval_cache(self) -> RetrievalCache | None:
        return self.retrieval.cache if self.retrieval is not None else None

    @property
    def runners(self) -> list[ModelRunner]:
        """Those that there are."""
        return [it for it in (self.draft, self.retrieval, self.target) if it is not None]

    @property
    def num_cache_bytes(self) -> int:
        """Bytes of all caches."""
        return sum(runner.cache.num_bytes for runner in self.runners)

    @property
    def shares_filters(self) -> bool:
        """Whether all rows must have the same filters, because passes are captured."""
        return self.graphs is not None


def allocate(
    models: Models,
    shape: MemoryShape,
    *,
    full: FullCache | None = None,
    held: PrefixCache | None = None,
    graphs: GraphPool | None = None,
    host: HostMemory | None = None,
) -> Memory:
    """Allocates and captures for runs of this shape.

    `full` is a full cache to take over; `held` are texts that another run left, in `full` or
    elsewhere; `host` lends memory for K and V. By default the full cache goes where it fits, and
    passes are captured on a GPU, but for those that stream K and V from host memory. Raises
    `InputError` if there is no room.
    """
    target = models.target
    speculation = shape.speculation
    draft = models.draft if any(plan.uses_drafter for plan in speculation.plans) else None
    if full is None:
        draft_config = draft.config if draft is not None else None
        settings = (draft_config, shape.generation, speculation)
        full = allocate_full_cache(target, *settings, shape.reserved_lengths, shape.capacity, host)
    elif isinstance(full, OffloadedFullCache):
        full.on_layer_staged = None  # it belongs to a retrieval cache that is gone
    is_row_invariant = target.execution.is_row_invariant
    prefix = PrefixCache(full, speculation.max_block, reads_alike=not is_row_invariant)
    if held is not None:  # before captures write to the slots of rows without a text
        prefix.adopt(held)
    if graphs is None:
        graphs = graph_pool(target.device, wanted=shape.generation.cuda_graphs)
    options: dict[str, Any] = {"vocab_size": target.config.vocab_size, "graphs": graphs}
    # A rebuild of the retrieval cache asks with those of the target's latest block.
    queries_LBTHD = empty_queries(target, shape.num_rows, speculation.max_block)
    drafting = retrieval = None
    try:
        if draft is not None:
            drafting = _draft_runner(draft, shape, options)
        if any(plan.uses_retrieval for plan in speculation.plans):
            retrieval = _retrieval_runner(models.retrieval, shape, full, queries_LBTHD, options)
        if full.on_chip < target.config.num_layers:
            options["graphs"] = None
        sizes = {min(size, speculation.max_block) for size in TARGET_BLOCKS}
        verifying = ModelRunner(
            target, full, shape.sampling, queries_LBTHD=queries_LBTHD, block_sizes=sizes, **options
        )
    except RuntimeError as error:  # out of memory, on CUDA too
        raise InputError(
            f"the small KV caches do not fit on {target.device} next to the full one "
            f"({shorten(error, 90)}); lower budget or num_recent_tokens, or shorten the prompt"
        ) from None
    return Memory(models, shape, full, prefix, verifying, retrieval, drafting, graphs)


def _draft_runner(draft: Llama, shape: MemoryShape, options: dict[str, Any]) -> DraftRunner:
    """The drafter's cache and what runs over it."""
    speculation = shape.speculation
    where: dict[str, Any] = {"dtype": draft.dtype, "device": draft.device}
    cache = StreamingCache(draft.config, draft.rope, shape.num_rows, speculation, **where)
    return DraftRunner(draft, cache, shape.sampling, **options)


def _retrieval_runner(
    model: Llama,
    shape: MemoryShape,
    full: FullCache,
    queries_LBTHD: Tensor,
    options: dict[str, Any],
) -> RetrievalRunner:
    """The retrieval cache and what runs over it; the queries are those of the target."""
    speculation = shape.speculation
    cache = RetrievalCache(
        full,
        make_policy(speculation.policy, full, speculation.chunk_size),
        speculation,
        num_heads=model.config.num_heads,
        budgets=[shape.budget_for(length) for length in shape.reserved_lengths],
    )
    if isinstance(full, OffloadedFullCache):
        full.rebuild_while_staged(cache, queries_LBTHD)
    sizes = {1, 1 + max(plan.gamma1 for plan in speculation.plans)}
    return RetrievalRunner(
        model, cache, shape.sampling, queries_LBTHD, block_sizes=sizes, **options
    )
