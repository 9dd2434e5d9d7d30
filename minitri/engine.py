"""The engine: turns prompts into a stream of typed events.

    engine = minitri.load("smollm2-135m")  # see loader.py
    for event in engine.generate("Once upon a time"):
        if isinstance(event, minitri.Token):
            print(event.text, end="", flush=True)

`generate` checks its input at once and returns a `Generation`, an iterator that works only while it
is asked for the next event. Nothing here prints.
"""

import dataclasses
import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from minitri.caches.snapshots import Origin, read_snapshot, write_snapshot
from minitri.config import ModelConfig
from minitri.drafters.plugin import Drafter
from minitri.errors import InputError, shorten
from minitri.generation import Generation
from minitri.gpu.allocation import most_rows
from minitri.loading.prompt_ids import Prompt, as_seeds, check_prompt, encode_prompts
from minitri.loading.tokenizer import Tokenizer
from minitri.memory import MemoryPool, MemoryShape, Models
from minitri.model.llama import Llama
from minitri.requests import Completion, End, Request, Row, expect
from minitri.settings import MAX_ROWS, GenerationConfig, SamplingParams, SpeculationConfig


@dataclass(eq=False, repr=False)
class Engine:
    """A model and its tokenizer, ready to generate any number of times, one after the other.

    It keeps the caches, and on a GPU the captured graphs, of the last run, until `release`. The
    next one starts after what its prompts have in common with those texts, and where it has the
    same settings and as many texts that are not longer, it captures nothing. Some attention kernels
    cut a cache by its size, so that there the last bits may depend on how long those texts were.
    """

    model: Llama
    tokenizer: Tokenizer
    draft: Llama | None = None
    retrieval_model: Llama | None = None
    drafter: Drafter | None = None
    """Who guesses: see `Models`."""
    sampling_defaults: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen)
    """What the model's generation_config.json recommends; nothing here applies it."""

    def __post_init__(self) -> None:
        self.snapshot_note = ""
        proposers = (self.retrieval_model or self.model, self.draft, self.drafter)
        self.models = Models(self.model, *proposers)
        self._pool = MemoryPool(self.models)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def drafter_name(self) -> str:
        """Of the object that guesses first, of the draft model, or `suffix`."""
        if self.drafter is not None:
            return type(self.drafter).__name__
        return self.draft.config.name if self.draft is not None else "suffix"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (frozen)
        speculation: SpeculationConfig | bool = True,
        method: str | None = None,
        seed: int | Sequence[int] = 0,
    ) -> Generation:
        """Starts a run over one prompt or several; each is a text or a list of token ids.

        With `speculation` False nothing is guessed; `method` replaces that of the settings. A
        single `seed` gives row b the seed `seed + b`. A row's tokens depend on its own prompt and
        seed alone, up to the last bits of the arithmetic; but where method or gammas are open, at a
        temperature above 0 and uncoupled, rows share the autotuner's choices. Raises `InputError`
        here, before any work, if a prompt is empty, too long, or has tokens outside the vocabulary.
        """
        ids = encode_prompts(prompts, self.tokenizer)
        pairs = zip(ids, as_seeds(seed, len(ids)), strict=True)
        requests = [Request(tokens, own, sampling, generation) for tokens, own in pairs]
        return self._run(requests, None, generation, _as_config(speculation, method))

    def stream(
        self,
        requests: Iterable[Request],
        *,
        batch_size: int = MAX_ROWS,
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (frozen)
        speculation: SpeculationConfig | bool = True,
    ) -> Generation:
        """Starts a run over any number of requests, at most `batch_size` of them at a time, fewer
        where memory is short.

        Events name requests by their numbers, from 0 on. Of `generation` counts what is of a run,
        such as `prefill_chunk`. Raises `InputError` before any work, and names the request.
        """
        _check_size(batch_size)
        listed = list(requests)
        if not listed:
            raise InputError("there are no requests; give at least one")
        return self._run(listed, batch_size, generation, _as_config(speculation))

    def open(
        self,
        *,
        batch_size: int = MAX_ROWS,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        generation: GenerationConfig = GenerationConfig(reserve=4096),  # noqa: B008 (frozen)
        speculation: SpeculationConfig | bool = True,
    ) -> Generation:
        """Starts a run without requests, which goes on until it is closed: see `Generation.submit`.

        A row has room for `generation.reserve` tokens, prompt and output. With captured graphs
        requests must have filters of the kinds that `sampling` has, or temperature 0; those whose
        numbers differ wait for one another. Raises `InputError` if there is no room.
        """
        room = generation.reserve
        _check_size(batch_size)
        if not 1 < room <= self.config.context_length:
            raise InputError(
                f"reserve is {room} tokens; give from 2 to {self.config.context_length}, the "
                f"context of {self.config.name}"
            )
        run = dataclasses.replace(generation, max_new_tokens=1)
        shape = MemoryShape((1,) * batch_size, sampling, run, _as_config(speculation))
        make_row = functools.partial(self._make_row, shape=shape)
        return Generation([], shape, self._pool, make_row)

    def _run(
        self,
        requests: list[Request],
        batch_size: int | None,
        run: GenerationConfig,
        speculation: SpeculationConfig,
    ) -> Generation:
        """At most `batch_size` at a time, as far as memory allows; None: all at once."""
        rows = []
        for number, request in enumerate(requests):
            try:
                rows.append(self._make_row(number, request))
            except InputError as error:
                where = f"request {number}: " if len(requests) > 1 else ""
                raise InputError(f"{where}{error}") from None
        num_new = max(request.generation.max_new_tokens for request in requests)
        run = dataclasses.replace(run, max_new_tokens=num_new)
        lengths = sorted((len(row.prompt) for row in rows), reverse=True)[:batch_size]
        if batch_size is not None:
            draft = self.draft.config if self.draft else None
            host = self._pool.host.num_free_bytes
            lengths = lengths[: most_rows(self.model, draft, run, speculation, lengths, host)]
        sampling = self._captured_filters([request.sampling for request in requests], run)
        shape = MemoryShape(tuple(lengths), sampling, run, speculation)
        return Generation(rows, shape, self._pool)

    def _make_row(self, number: int, request: Request, shape: MemoryShape | None = None) -> Row:
        """A request, checked, also by the shape of an open run."""
        expect(request, Request)
        [ids] = encode_prompts([request.prompt], self.tokenizer)
        check_prompt(ids, self.config, request.generation.max_new_tokens)
        expect(request.speculation, bool)
        request = dataclasses.replace(request, seed=as_seeds([request.seed], 1)[0])
        if shape is not None:
            num_tokens = len(ids) + request.generation.max_new_tokens
            if num_tokens > (room := shape.generation.reserve):
                raise InputError(
                    f"prompt and output are {num_tokens} tokens, but there is room for {room}; "
                    "shorten the prompt, lower max_new_tokens, or reserve more"
                )
            captured = dataclasses.replace(shape.sampling, temperature=1.0)  # it has a form, too
            self._captured_filters([captured, request.sampling], shape.generation)
        return Row(number, request, ids, self.tokenizer)

    def _captured_filters(
        self, wanted: list[SamplingParams], run: GenerationConfig
    ) -> SamplingParams:
        """The filters to capture. Raises `InputError` if one graph cannot apply all these."""
        first, *others = {it.form: it for it in wanted if it.temperature > 0}.values() or wanted[:1]
        if others and self.model.device.type == "cuda" and run.cuda_graphs:
            raise InputError(
                f"captured graphs have filters of one kind, got {first} and {others[0]}; give "
                "every request the same kinds, or switch cuda_graphs off"
            )
        return first

    def complete(self, prompt: Prompt, **settings: Any) -> Completion:
        """All that a model says after one prompt; `settings` are those of `generate`."""
        with self.generate(prompt, **settings) as run:
            if len(run.rows) > 1:
                raise InputError(f"complete takes one prompt, got {len(run.rows)}; use generate")
            return next(event for event in run if isinstance(event, End))

    @property
    def held_tokens(self) -> list[int]:
        """The longest text whose K and V are kept from the last run, or come from a snapshot."""
        return list(held.tokens) if (held := self._pool.held) is not None else []

    def save_kv(self, path: str | os.PathLike[str], note: str = "") -> int:
        """Writes K and V of `held_tokens` to a file, for `load_kv`, which appears when it is
        complete; returns how many tokens. Raises `InputError`."""
        if (held := self._pool.held) is None:
            raise InputError("there is no KV cache to save; let the engine read a prompt first")
        return write_snapshot(os.fsdecode(path), held, self._origin(), note)

    def load_kv(self, path: str | os.PathLike[str]) -> int:
        """Opens a file of `save_kv`: texts that begin like its tokens start after them, until
        `release`. Returns how many tokens it holds; its note is in `snapshot_note`. Raises
        `InputError` if it is damaged, or not of this model, dtype and RoPE."""
        held, self.snapshot_note = read_snapshot(os.fsdecode(path), self._origin())
        self._pool.snapshot = held
        return len(held.tokens)

    def _origin(self) -> Origin:
        """What K and V here depend on."""
        execution = self.model.execution
        if execution.ranks.count > 1 or not execution.fingerprint:
            raise InputError(
                f"the KV cache of {self.config.name} is neither saved nor loaded: it was not read "
                "from a file, or is divided among processes"
            )
        return Origin(self.config, self.model.dtype, execution.fingerprint)

    def release(self) -> None:
        """Frees the caches and graphs that are kept from one run to the next."""
        self._pool.clear()


def _as_config(
    speculation: SpeculationConfig | bool, method: str | None = None
) -> SpeculationConfig:
    """What to speculate: settings, the default ones, or nothing; perhaps by another method."""
    if isinstance(speculation, bool):
        speculation = SpeculationConfig("auto" if speculation else "autoregressive")
    expect(speculation, SpeculationConfig)
    if method is not None:
        speculation = dataclasses.replace(speculation, method=method)
    return speculation


def _check_size(batch_size: int) -> None:
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size is {shorten(repr(batch_size), 60)}; it must be at least 1")
