"""The engine: models and a tokenizer, which turn prompts into a stream of typed events."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from os import PathLike, fsdecode
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from minitri.core.drafters.plugin import Drafter
from minitri.core.errors import InputError
from minitri.core.generation import CLOSED, Generation
from minitri.core.memory import MemoryPool, Models, check_process, computing
from minitri.core.model.llama import Llama
from minitri.core.requests import End, Event, Prompt, Request, RequestState, check_run, settings_of
from minitri.core.settings import MAX_ROWS, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.core.shape import MemoryShape
from minitri.files.kv_store import KVStore
from minitri.files.snapshots import read_snapshot, write_snapshot
from minitri.text.grammar import Grammar
from minitri.text.prepare import prepare, prepare_all
from minitri.text.prompt_ids import as_seeds, check_prompt, encode_prompt, split_prompts
from minitri.text.tokenizer import Messages, Tokenizer
from minitri.trees.tree_level import TreeLevel
from minitri.worker import Job, Worker

LEAST_ROOM = 4096
"""Tokens, prompt and output, that a row of an open run has room for unless more are reserved."""


class Engine(AbstractContextManager["Engine"]):
    """A model and its tokenizer, ready to generate any number of times.

    Until `release` an engine keeps KV caches and CUDA graphs of the last run: the next prompts
    reuse K and V of beginnings that they share with its texts. Some attention kernels split a cache
    by its size, so the last bits of logits may depend on how long earlier texts were. Threads may
    share an engine, which computes for one at a time; a forked process cannot use it."""

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        draft: Llama | None = None,
        retrieval_model: Llama | None = None,
        drafter: Drafter | None = None,
        sampling_defaults: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    ) -> None:
        """Makes an engine of a target `model`. `drafter` or else `draft` guesses tokens, as does
        `retrieval_model` (or `model`) with part of the KV cache. Runs take `sampling_defaults`."""
        self.config = model.config
        self.tokenizer = tokenizer
        self.sampling_defaults = sampling_defaults
        """Default sampling, as the model's files recommend; that of a `Request` is greedy."""
        self.snapshot_note = ""  # that of `save_kv`, in the file that `load_kv` has read
        pool = MemoryPool(Models(model, retrieval_model or model, draft, drafter, TreeLevel))
        self._memory: MemoryPool | None = pool
        # For `agenerate`; refers to no engine, so that one that nobody needs is freed at once.
        self._worker = Worker(lambda shape: open_run(pool.fitting(shape), pool, tokenizer))

    def __repr__(self) -> str:
        if self._memory is None:
            return f"Engine({self.config.name!r}, closed)"
        where = f"{self.model.dtype} on {self.model.device}"
        return f"Engine({self.config.name!r}, drafter {self.models.drafter_name}, {where})"

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InputError("an engine is not pickled or copied; load it in each process")

    @property
    def _pool(self) -> MemoryPool:
        if self._memory is None:
            raise InputError(CLOSED)
        return self._memory

    @property
    def models(self) -> Models:
        """All loaded models: the target, and those that guess."""
        return self._pool.models

    @property
    def model(self) -> Llama:
        """The loaded target, whose distribution texts follow."""
        return self.models.target

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        seed: int | Sequence[int] | None = None,
        **settings: Any,
    ) -> Generation:
        """Starts a run over one prompt or several, texts or lists of token ids: it yields events.

        `settings` are fields such as `max_new_tokens=8`, `temperature=0.7` or `method="triforce"`,
        or whole: `sampling` (by default `sampling_defaults`, as in all programs; temperature 0 is
        greedy), `generation` and `speculation` (False turns guessing off). `json_schema`, a
        dictionary, JSON, or a class of pydantic, stands for `grammar`. A number as `seed` gives
        prompt b `seed + b`, a list one each. Without it seeds are drawn, see `End.seed`, and the
        autotuner uses measured times. A text depends on its own prompt and seed alone, up to
        rounding; but at a temperature above 0, uncoupled, with method or gammas not set, prompts
        share the autotuner's choices. Raises `InputError` before any work."""
        sampling, generation, speculation = self._merge(**settings)
        texts = split_prompts(prompts)
        seeds = [None] * len(texts) if seed is None else as_seeds(seed, len(texts))
        requests = [Request(*pair, sampling, generation) for pair in zip(texts, seeds, strict=True)]
        return self._run(requests, generation, speculation)

    def chat(self, messages: Messages, **settings: Any) -> Generation:
        """Starts a run that answers messages: one user's text, or dicts with `role` and `content`.
        `settings` are those of `generate`."""
        return self.generate(self.tokenizer.encode_chat(messages), **settings)

    def complete(self, prompt: Prompt, **settings: Any) -> End:
        """Generates and returns the whole output for one prompt; `settings` as in `generate`."""
        return self.generate(prompt, **settings).result()

    async def agenerate(self, prompt: Prompt, **settings: Any) -> AsyncGenerator[Event, None]:
        """Generates text after one prompt for asyncio: yields events; `settings` as in `generate`.
        A thread computes. Concurrent calls are rows of one batch, at most 8 at a time; one that
        needs other settings of a run, or more room, waits for the others to end. Leaving the loop
        ends a text; a seed repeats it if `coupled`. Raises `InputError` at the first event."""
        worker, request, shape = await asyncio.to_thread(self._shared, prompt, **settings)
        job = Job([request], shape)
        worker.submit(job)
        try:
            async for event in job.events():
                yield event
        finally:
            job.is_cancelled = True

    def achat(self, messages: Messages, **settings: Any) -> AsyncGenerator[Event, None]:
        """Answers messages, a text or dicts with `role` and `content`: yields events as `agenerate`
        does, with `settings` of `generate`. Raises `InputError` at once."""
        return self.agenerate(self.tokenizer.encode_chat(messages), **settings)

    def score(self, text: Prompt) -> Tensor:
        """Natural log-probabilities, (N - 1,) in float32 on the CPU, of a text's N tokens but the
        first, by unfiltered logits. Raises `InputError`, also where memory has no room for K and V
        of the text next to the KV caches that the engine keeps; `release` frees these."""
        return torch.tensor([logprob for logprob, _ in self.scoring(text).result().prompt_scores])

    def scoring(self, text: Prompt) -> Generation:
        """Starts a run that scores a text, see `score`: its `End` has the `prompt_scores`."""
        ids = encode_prompt(text, self.tokenizer)
        check_prompt(ids, self.config, 0)
        if len(ids) < 2:
            raise InputError("the text is one token, after which nothing is scored; give more")
        settings = (SamplingParams(), GenerationConfig(1, cuda_graphs=False))
        state = RequestState(0, Request(ids, 0, *settings, score_prompt=True), ids)
        shape = MemoryShape((len(ids),), *settings, SpeculationConfig("autoregressive"))
        pool = MemoryPool(self.models)  # of its own: the text that the engine holds stays
        pool.runs = self._pool.runs
        return Generation([state], shape, pool)

    def stream(
        self, requests: Iterable[Request], *, batch_size: int = MAX_ROWS, **settings: Any
    ) -> Generation:
        """Starts a run over requests, `batch_size` at a time, or fewer where memory is short.
        Events number requests by `row`, from 0. `settings` of the run are fields such as `method`,
        or whole: `generation`, `speculation`. Raises `InputError` about a request before work."""
        check_run(batch_size, settings)
        _, generation, speculation = settings_of(SamplingParams(), **settings)
        requests = list(requests)
        if not requests:
            raise InputError("there are no requests; give at least one")
        return self._run(requests, generation, speculation, batch_size)

    def open(self, *, batch_size: int = MAX_ROWS, **settings: Any) -> Generation:
        """Starts a run of `batch_size` rows, which takes requests by `Generation.submit`.

        `settings` are those of `stream`, and `sampling`. A row has room for `reserve` tokens of
        prompt and output, by default 4096 or the context. On a GPU all requests run slower while
        one differs from `sampling` in top-k, or in whether it has top-p or min-p. A request that
        fails ends alone, see `End.error`. Raises `InputError` if memory has no room."""
        check_run(batch_size, settings)
        most = self.config.context_length
        sampling, generation, speculation = self._merge(**settings)
        room = generation.reserve or min(LEAST_ROOM, most)
        if not 1 < room <= most:
            raise InputError(f"reserve is {room} tokens; give from 2 to {most}, the whole context")
        shape = MemoryShape((1,) * batch_size, sampling, generation.for_run(room), speculation)
        return open_run(shape, self._pool, self.tokenizer)

    def _merge(
        self, sampling: SamplingParams | None = None, json_schema: Any = None, **settings: Any
    ) -> tuple[SamplingParams, GenerationConfig, SpeculationConfig]:
        """Makes settings of keywords of `generate`: whole ones, their fields, and a `json_schema`,
        which becomes the grammar. `sampling` is by default `sampling_defaults`."""
        if json_schema is not None:
            if settings.get("grammar") is not None:
                raise InputError("json_schema and grammar are both given; leave one of them out")
            settings["grammar"] = Grammar("json_schema", json_schema)
        return settings_of(self.sampling_defaults if sampling is None else sampling, **settings)

    def _run(
        self,
        requests: list[Request],
        generation: GenerationConfig,
        speculation: SpeculationConfig,
        batch_size: int | None = None,
    ) -> Generation:
        """Starts a run of `batch_size` rows, or fewer if memory is short; None: one per request."""
        states = prepare_all(requests, self.model, self.tokenizer)
        # Without given seeds the autotuner may use measured times; programs set `timed` themselves.
        if all(request.seed is None for request in requests):
            speculation = replace(speculation, timed=True)
        longest = max(state.request.generation.max_new_tokens for state in states)
        generation = replace(generation, max_new_tokens=longest)
        lengths = sorted((len(state.prompt_ids) for state in states), reverse=True)[:batch_size]
        # CUDA graphs have one request's filters, a sampled one's if any is; greedy rows fit all.
        wanted = [request.sampling for request in requests]
        sampling = max(wanted, key=lambda sampling: (sampling.temperature > 0, sampling.form))
        shape = MemoryShape(tuple(lengths), sampling, generation, speculation)
        if batch_size:
            shape = self._pool.fitting(shape)
        return Generation(states, shape, self._pool)

    def _shared(
        self, prompt: Prompt, seed: int | None = None, **settings: Any
    ) -> tuple[Worker, Request, MemoryShape]:
        """For `agenerate`: the worker's thread, the request for `prompt`, and the shape of the
        memory (rows, lengths, settings) of the run to join; `settings` as in `generate`."""
        check_process(self.models)
        if self.model.execution.ranks.count > 1:
            raise InputError("agenerate is for a model of one process; use generate")
        sampling, generation, speculation = self._merge(**settings)
        state = prepare(0, Request(prompt, seed, sampling, generation), self.model, self.tokenizer)
        num_tokens = len(state.prompt_ids) + generation.max_new_tokens
        room = max(generation.reserve, LEAST_ROOM, 1 << (num_tokens - 1).bit_length())
        generation = generation.for_run(min(room, self.config.context_length))
        speculation = replace(speculation, timed=not speculation.coupled)
        shape = MemoryShape((1,) * MAX_ROWS, self.sampling_defaults, generation, speculation)
        return self._worker, state.request, shape

    @property
    def held_tokens(self) -> list[int]:
        """Token ids of the longest text kept from the last run, or else of `load_kv`'s file."""
        return list(self._pool.held.tokens) if self._pool.held else []

    def save_kv(self, path: str | bytes | PathLike[str], note: str = "") -> int:
        """Writes K and V of `held_tokens`, and a note, to a file; returns the number of tokens."""
        with computing(self.models):
            if not (held := self._pool.held):
                raise InputError("there is no KV cache to save; let the engine read a prompt first")
            return write_snapshot(Path(fsdecode(path)), held, self.model, note)

    def load_kv(self, path: str | bytes | PathLike[str]) -> int:
        """Reads a file that `save_kv` wrote; prompts that begin like its text reuse its K and V
        until `release`. Returns its number of tokens. Raises `InputError` for any other file."""
        held, self.snapshot_note = read_snapshot(Path(fsdecode(path)), self.model)
        self._pool.snapshot = held
        return len(held.tokens)

    def open_kv_store(self, folder: str, num_bytes: int) -> None:
        """Shares K and V with other engines by a folder of at most `num_bytes`, until `release`."""
        self._pool.store = KVStore(folder, num_bytes, self.model)

    def release(self) -> None:
        """Frees memory kept between runs: KV caches, CUDA graphs, a loaded snapshot, KV store."""
        with self.models.lock:
            self._pool.clear()

    def close(self) -> None:
        """Ends all runs, after the current step, and frees all; later calls raise `InputError`."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        self._worker.close()
        for run in [*memory.runs]:
            run.close()
        memory.clear()


def open_run(shape: MemoryShape, pool: MemoryPool, tokenizer: Tokenizer) -> Generation:
    """Starts a run in memory of this shape from `pool`; it takes requests until it is closed."""
    make = partial(prepare, model=pool.models.target, tokenizer=tokenizer)
    return Generation([], shape, pool, make)
