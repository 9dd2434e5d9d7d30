"""The stack of a run: the texts of its rows, and the stages that extend them speculatively.
Legend: B rows, N places of a block, V vocab, L layers, T tokens, H query heads, D head dim."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from minitri.core.decoding.autotuner import Autotuner
from minitri.core.decoding.cascade import Cascade
from minitri.core.decoding.level import Stage
from minitri.core.decoding.random_source import CoupledSource, IndependentSource, RandomSource
from minitri.core.decoding.verification import Emitted, Rows
from minitri.core.drafters.lookup import LookupDrafter
from minitri.core.drafters.plugin import PluggedDrafter
from minitri.core.errors import InputError, shorten
from minitri.core.graphs import GraphPool
from minitri.core.log import log
from minitri.core.memory import Memory, Models, fault_of
from minitri.core.offload.streams import clock_of
from minitri.core.prefill import prefill
from minitri.core.requests import RequestState
from minitri.core.roofline import CPU, GPU, NARROW_CPU, Workload, bytes_per_pass
from minitri.core.shape import MemoryShape
from minitri.core.stats import Meter, Stats


class Stack:
    """The texts of a run, and the cascade of stages that extends them by speculative decoding."""

    def __init__(self, memory: Memory, shape: MemoryShape, *, is_open: bool = False) -> None:
        """Makes the stack of a run of this `shape`, over the empty caches of `memory`.
        `is_open`: requests may come at any time. Raises `InputError`."""
        models = memory.models
        speculation = shape.speculation
        self.memory = memory
        self.shape = shape
        self.target = models.target
        self._is_open = is_open
        self.sequences: Rows = [[] for _ in shape.prompt_lengths]
        self._ends = [0] * shape.num_rows  # most tokens that each row may have, with its prompt
        runners = memory.runners
        self._pass_bytes = {  # shares of ranks may be uneven
            name: self.target.execution.ranks.least(bytes_per_pass(runner.model))
            for name, runner in runners.items()
        }
        self.stats = Stats(kv_cache_bytes=sum(it.cache.num_bytes for it in runners.values()))
        use_clock = may_use_clock(models, shape, is_open=is_open)
        predictor = self.predictor_for(shape.prompt_lengths)
        self.tuner = Autotuner(speculation.plans, predictor, use_clock=use_clock)
        # The retrieval cache is kept built from the start where that is cheap: a short text is just
        # copied, and K and V in host memory pass through the device anyway.
        longest = max(*shape.prompt_lengths, shape.generation.reserve)
        is_short = longest <= max(shape.budgets)
        self.tuner.wants_retrieval |= is_short or memory.full.is_hosted
        self.meter = Meter(self.stats, self.tuner, clock_of(self.target.device))
        independent = IndependentSource(speculation.verification)
        self.source: RandomSource = CoupledSource() if speculation.coupled else independent
        rule = self.source.rule
        self.source.run_rule = self.target.execution.rules.get(rule, rule)
        drafter: Stage | None = None  # made before the levels: statistics list the lowest first
        if "draft" in shape.stages and not models.draft:
            where = (self.meter, runners["target"])
            drafter = (
                LookupDrafter(*where)
                if models.drafter is None
                else PluggedDrafter(*where, self.source, models.drafter)
            )
        *below, target = [  # of draft, retrieval, target those that the plans need, in this order
            models.level_type(name, self.meter, runner, self.source)
            for name, runner in runners.items()
        ]
        self.cascade = Cascade(self.sequences, self.meter, target, drafter, *below)
        if memory.graphs:
            self._capture(memory.graphs)

    def _capture(self, graphs: GraphPool) -> None:
        """Captures all passes and verdicts as CUDA graphs, unless an earlier run has done so.
        Passes for which memory is short then run eagerly. Raises `InputError`."""
        rule = self.source.rule
        self.source.run_rule = functools.partial(graphs.run, rule)
        graphs.is_capturing = rule not in graphs.rules
        try:
            for stage in reversed(self.cascade.stages) if graphs.is_capturing else ():
                stage.capture(self.shape.speculation.plans)
        except RuntimeError as error:  # also raised when memory runs out
            fault = fault_of(error, self.memory.models)
            # Ranks have to capture the same passes.
            if self.target.execution.ranks.count > 1 or not fault:
                problem = f"a CUDA graph could not be captured ({shorten(error, 90)})"
                raise InputError(problem, "use cuda_graphs=False") from error
            log.warning("%s, so some passes are not captured and take longer", fault.message)
        graphs.rules.add(rule)
        graphs.is_capturing = False

    def admit(self, b: int, state: RequestState) -> Iterator[int]:
        """Gives the empty row b of the batch to a request; returns an iterator to read its prompt.
        After every chunk it yields how many of the prompt's tokens are in the cache; at last the
        number of all, though `start` reads the last one. Between chunks other rows may decode,
        except where a cache in host memory is filled layer by layer."""
        memory = self.memory
        request = state.request
        text_filters = state.make_filters()
        num_tokens = len(state.prompt_ids)
        self.sequences[b][:] = state.prompt_ids
        self._ends[b] = num_tokens + request.generation.max_new_tokens
        memory.prefix.owners[b] = request.owner
        self.cascade.active[b] = False
        self.cascade.guessing[b] = request.speculation
        self.source.restart(b, request.seed or 0)
        if memory.retrieval_cache:
            memory.retrieval_cache.reset(b, self.shape.budget_for(num_tokens))
        for runner in memory.runners.values():
            runner.set_sampling(b, request.sampling, text_filters)
        return self._prefill(b, state)

    def _prefill(self, b: int, state: RequestState) -> Iterator[int]:
        memory = self.memory
        cache = memory.retrieval_cache
        prompt = state.prompt_ids
        self.stats.num_prompt_tokens += len(prompt)
        most = len(prompt) - 1  # tokens whose K and V may be those of an earlier text
        if state.request.score_prompt:
            most = 0
        elif cache:
            # The last ones (None: all) are read even if held: their queries choose the chunks.
            most -= cache.max_prompt_queries or most
        num_held = memory.prefix.take(b, self.sequences, max(0, most))
        state.stats.num_cached_tokens = num_held
        decodes_between = self._is_open or not memory.full.is_hosted
        for length in prefill(
            self.target,
            prompt,
            memory.full,
            b,
            chunk=self.shape.generation.prefill_chunk,
            watch=functools.partial(cache.observe, b) if cache else None,
            max_queries=cache.max_prompt_queries if cache else None,
            scores=state.prompt_scores if state.request.score_prompt else None,
            num_top=state.request.generation.logprobs or 0,
            size=self._chunk_size if decodes_between else None,
        ):
            self.stats.num_prefilled_tokens += length - num_held
            num_held = length
            if num_held < len(prompt) - 1:
                yield num_held
        self.stats.num_prefilled_tokens += 1  # the last token, which `start` reads
        memory.prefix.publish(b, prompt[:-1])
        yield len(prompt)

    def _chunk_size(self) -> int:
        """Tokens of a prompt's next chunk: few while other rows wait for their next token.
        If requests may come at any time, the power of 2 that is read in about a second."""
        generation = self.shape.generation
        most, shared = generation.prefill_chunk, generation.shared_chunk
        if self._busy:
            return min(most, shared)
        if self._is_open and not self.memory.full.is_hosted:  # hosted: a chunk fetches all K, V
            speed = self.stats.num_prefilled_tokens / (self.stats.prefill_seconds or 1)
            most = min(most, max(shared, 1 << max(int(speed).bit_length() - 1, 0)))
        return most

    def start(self, rows: list[int]) -> dict[int, Emitted]:
        """Samples, and returns by row, the first token of rows whose prompts have been read."""
        for b in rows:
            self.cascade.active[b] = True
        self._expect_costs()
        part, first = self._part(rows)
        with self.target.execution.decoding():
            emitted = part.start([b - first for b in rows])
            outcome = self._commit({b: emitted[b - first] for b in rows})
            part, _ = self._part(self._busy)
            part.catch_up()
        return outcome

    def step(self) -> dict[int, Emitted]:
        """Decodes one step; returns what started rows emit, no token if logits are not finite."""
        busy = self._busy
        self.tuner.num_left = sum(self._ends[b] - len(self.sequences[b]) for b in busy) / len(busy)
        part, first = self._part(busy)
        with self.target.execution.decoding():
            emitted = part.step()
            return self._commit({b: emitted[b - first] for b in busy})

    @property
    def _busy(self) -> list[int]:
        return [b for b, on in enumerate(self.cascade.active) if on]

    def predictor_for(self, lengths: Sequence[int]) -> Callable[[str, float], float]:
        """A function of stage and number of guesses: predicted seconds over texts of `lengths`."""
        draft = self.memory.runners.get("draft")
        target = self.target
        work = Workload(
            target.config,
            draft.model.config if draft else None,
            itemsize=target.dtype.itemsize,
            pass_bytes=self._pass_bytes,
            num_tokens=sum(lengths),
            num_retrieved=sum(map(self.shape.budget_for, lengths)),
            hosted_share=1 - self.memory.full.on_chip / target.config.num_layers,
            batch_size=len(lengths),
        )
        cpu = NARROW_CPU if target.execution.is_narrow else CPU
        machine = GPU if target.device.type == "cuda" else cpu
        return functools.lru_cache(1024)(functools.partial(work.seconds, machine))

    def _expect_costs(self) -> None:
        if lengths := [len(self.sequences[b]) for b in self._busy]:
            self.tuner.predict_seconds = self.predictor_for(lengths)

    def _part(self, rows: list[int]) -> tuple[Cascade, int]:
        """A cascade over rows from the first to the last of `rows`, or more, and its first row."""
        span = slice(min(rows), max(rows) + 1)
        is_fixed = self.memory.graphs or self.memory.full.is_hosted  # rows cannot be cut
        if is_fixed or span == slice(0, len(self.sequences)):
            return self.cascade, 0
        return self.cascade.of_rows(span), span.start

    def _commit(self, emitted: dict[int, Emitted]) -> dict[int, Emitted]:
        """Updates the retrieval cache by `emitted`; returns it, with errors of failed updates."""
        cache = self.memory.retrieval_cache
        if cache:
            cache.is_wanted = self.tuner.wants_retrieval
        for b, new in emitted.items():
            if cache and new.tokens:
                # Queries of the tokens that the pass read and kept, which begin its block: the
                # text's last one and all new ones but the last, which the next pass reads.
                queries_LTHD = cache.queries_LBTHD[:, b, : len(new.tokens)]
                try:
                    self.stats.num_rebuilds += cache.commit(b, queries_LTHD)
                except (RuntimeError, MemoryError) as error:
                    emitted[b] = replace(new, tokens=[], error=error)
        return emitted

    def retire(self, b: int, *, is_sound: bool = True) -> None:
        """Ends the text of row b; with `is_sound` later prompts may reuse its K and V."""
        self.memory.prefix.keep(b, self.sequences[b] if is_sound else [])
        self.cascade.retire(b)
        self._expect_costs()


def may_use_clock(models: Models, shape: MemoryShape, *, is_open: bool = False) -> bool:
    """Whether the autotuner may time plans: on one device, if all give the same text, or the
    settings say `timed`. `is_open`: requests with any sampling settings may still come."""
    target = models.target
    speculation = shape.speculation
    if target.execution.ranks.count > 1:
        return False
    is_greedy = shape.sampling.temperature == 0 and not is_open
    is_same_text = speculation.coupled or is_greedy
    # Outside float32 on a CPU, the size of a block may decide a near-tie.
    is_float32 = target.dtype == torch.float32 and target.device.type == "cpu"
    # The slots of a path, and so the order in which attention adds, depend on the tree.
    is_exact = (is_float32 or target.execution.is_row_invariant) and not speculation.tree
    return speculation.timed or (is_same_text and is_exact)
