"""The engine: models and a tokenizer, which turn prompts into a stream of typed events."""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
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
"""Default room of a row, in tokens, in a run that takes requests while it goes on (`open`)."""


class Engine(AbstractContextManager["Engine"]):
    """A model and its tokenizer, ready to generate any number of times, one run after another.

    Until `release` an engine keeps caches and captured graphs of the last run: prompts of the next
    run reuse K and V of beginnings that they share with the last texts. Some attention kernels
    split a cache by its size, so the last bits may depend on how long earlier texts were. Threads
    may share an engine, which computes for one at a time; a forked process cannot use it."""

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        draft: Llama | None = None,
        retrieval_model: Llama | None = None,
        drafter: Drafter | None = None,
        sampling_defaults: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
    ) -> None:
        """Makes an engine; models `draft` and `retrieval_model`, or a `drafter`, guess tokens."""
        self.config = model.config
        self.tokenizer = tokenizer
        self.sampling_defaults = sampling_defaults
        """Sampling that the model's files recommend, by default for all but a `Request`."""
        self.snapshot_note = ""
        pool = MemoryPool(Models(model, retrieval_model or model, draft, drafter, TreeLevel))
        self._memory: MemoryPool | None = pool
        # Refers to no engine, so that one which nobody needs is freed at once.
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
        return self._pool.models

    @property
    def model(self) -> Llama:
        return self.models.target

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        seed: int | Sequence[int] | None = None,
        **settings: Any,
    ) -> Generation:
        """Starts a run over one prompt or several; each is a text or a list of token ids.

        `settings` are fields such as `max_new_tokens=8`, `temperature=0.7` or `method="triforce"`,
        or whole: `sampling` (by default `sampling_defaults`, as in all programs; temperature 0 is
        greedy), `generation` and `speculation` (False turns guessing off). `json_schema` is a
        dictionary, JSON, or a class of pydantic, and stands for `grammar`. A `seed` gives row b the
        seed `seed + b`. Without one each row draws a seed, reported by its `End`, and the autotuner
        uses measured times. A row's tokens depend on its own prompt and seed alone, up to rounding;
        but at a temperature above 0, uncoupled, with method or gammas not set, rows share the
        autotuner's choices. Raises `InputError` before any work."""
        sampling, generation, speculation = self._merge(**settings)
        texts = split_prompts(prompts)
        seeds = [None] * len(texts) if seed is None else as_seeds(seed, len(texts))
        requests = [Request(*pair, sampling, generation) for pair in zip(texts, seeds, strict=True)]
        return self._run(requests, generation, speculation)

    def chat(self, messages: Messages, **settings: Any) -> Generation:
        """Starts a run over the answer to messages or a text: see `Tokenizer.encode_chat`."""
        return self.generate(self.tokenizer.encode_chat(messages), **settings)

    def complete(self, prompt: Prompt, **settings: Any) -> End:
        """Generates the whole output for one prompt; `settings` as for `generate`."""
        return self.generate(prompt, **settings).result()

    async def agenerate(self, prompt: Prompt, **settings: Any) -> AsyncGenerator[Event, None]:
        """Generates text after one prompt for asyncio: yields events; `settings` as in `generate`.

        A thread computes; concurrent calls are rows of one batch, at most `MAX_ROWS` at a time.
        Leaving the loop ends the text. A seed repeats its text only with `coupled=True`, as the
        autotuner uses measured times. Raises `InputError` at the first event."""
        worker, request, shape = await asyncio.to_thread(self._shared, prompt, **settings)
        job = Job([request], shape)
        worker.submit(job)
        try:
            async for event in job.events():
                yield event
        finally:
            job.is_cancelled = True

    def achat(self, messages: Messages, **settings: Any) -> AsyncGenerator[Event, None]:
        """Answers messages for asyncio, see `agenerate`. Raises `InputError` for wrong messages."""
        return self.agenerate(self.tokenizer.encode_chat(messages), **settings)

    def score(self, text: Prompt) -> Tensor:
        """Natural log-probabilities of a text's tokens but the first, before all filters.
        (N - 1,) float32 on the CPU, for N tokens. Raises `InputError`, also where there is no room
        for K and V next to those that the engine holds; `release` frees these."""
        end = self.scoring(text).result()
        return torch.tensor([logprob for logprob, _ in end.prompt_scores])

    def scoring(self, text: Prompt) -> Generation:
        """Starts a run that reads a text: its `End` has the `prompt_scores`. See `score`."""
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
        self,
        requests: Iterable[Request],
        *,
        batch_size: int = MAX_ROWS,
        **settings: Any,
    ) -> Generation:
        """Starts a run over requests, `batch_size` at a time, or fewer where memory is short.

        Events name requests by their numbers, from 0. `settings` are those of the run, such as
        `method`, or `generation` and `speculation`. Raises `InputError` before any work, naming the
        request."""
        check_run(batch_size, settings)
        _, generation, speculation = settings_of(SamplingParams(), **settings)
        requests = list(requests)
        if not requests:
            raise InputError("there are no requests; give at least one")
        return self._run(requests, generation, speculation, batch_size)

    def open(self, *, batch_size: int = MAX_ROWS, **settings: Any) -> Generation:
        """Starts an open run, which takes requests by `Generation.submit` until it is closed.

        `settings` are those of `generate`; a row has room for `reserve` tokens, by default 4096 or
        the context. On a GPU all run slower while one has another top-k or kinds of filters than
        `sampling`. A request that fails ends alone: see `End.error`. Raises `InputError` without
        room."""
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
        """All settings of a text, see `settings_of`; sampling begins with `sampling_defaults`."""
        if json_schema is not None:
            if settings.get("grammar") is not None:
                raise InputError("json_schema and grammar are both given; leave one of them out")
            settings["grammar"] = Grammar("json_schema", json_schema)
        sampling = self.sampling_defaults if sampling is None else sampling
        return settings_of(sampling, **settings)

    def _run(
        self,
        requests: list[Request],
        generation: GenerationConfig,
        speculation: SpeculationConfig,
        batch_size: int | None = None,
    ) -> Generation:
        """Starts a run: `batch_size` requests at a time, as memory allows; None: all at once."""
        states = prepare_all(requests, self.model, self.tokenizer)
        # Without given seeds the autotuner may use measured times; programs set `timed` themselves.
        if all(request.seed is None for request in requests):
            speculation = replace(speculation, timed=True)
        longest = max(state.request.generation.max_new_tokens for state in states)
        generation = replace(generation, max_new_tokens=longest)
        lengths = sorted((len(state.prompt_ids) for state in states), reverse=True)[:batch_size]
        # Graphs are captured with filters of one request: above temperature 0, if any, as greedy
        # rows can use any graph.
        wanted = [request.sampling for request in requests]
        sampling = max(wanted, key=lambda sampling: (sampling.temperature > 0, sampling.form))
        shape = MemoryShape(tuple(lengths), sampling, generation, speculation)
        if batch_size is not None:
            shape = self._pool.fitting(shape)
        return Generation(states, shape, self._pool)

    def _shared(
        self, prompt: Prompt, seed: int | None = None, **settings: Any
    ) -> tuple[Worker, Request, MemoryShape]:
        """For `agenerate`: the worker, the request, and the memory shape of the run to join."""
        check_process(self.models)
        if self.model.execution.ranks.count > 1:
            raise InputError("agenerate is for a model of one process; use generate")
        sampling, generation, speculation = self._merge(**settings)
        request = Request(prompt, seed, sampling, generation)
        state = prepare(0, request, self.model, self.tokenizer)
        num_tokens = len(state.prompt_ids) + generation.max_new_tokens
        room = max(generation.reserve, LEAST_ROOM, 1 << (num_tokens - 1).bit_length())
        generation = generation.for_run(min(room, self.config.context_length))
        speculation = replace(speculation, timed=not speculation.coupled)
        shape = MemoryShape((1,) * MAX_ROWS, self.sampling_defaults, generation, speculation)
        return self._worker, state.request, shape

    @property
    def held_tokens(self) -> list[int]:
        """Tokens of the longest text whose K and V are kept from the last run or a snapshot."""
        return list(self._pool.held.tokens) if self._pool.held else []

    def save_kv(self, path: str | bytes | os.PathLike[str], note: str = "") -> int:
        """Writes K and V of the longest kept text to a file; returns its number of tokens."""
        with computing(self.models):
            if (held := self._pool.held) is None:
                raise InputError("there is no KV cache to save; let the engine read a prompt first")
            return write_snapshot(Path(os.fsdecode(path)), held, self.model, note)

    def load_kv(self, path: str | bytes | os.PathLike[str]) -> int:
        """Opens a file that `save_kv` wrote; prompts reuse its K and V until `release`.
        Returns its number of tokens; sets `snapshot_note`. Raises `InputError` if it is unfit."""
        held, self.snapshot_note = read_snapshot(Path(os.fsdecode(path)), self.model)
        self._pool.snapshot = held
        return len(held.tokens)

    def open_kv_store(self, folder: str, num_bytes: int) -> None:
        """Shares K and V of prompts with other engines until `release`: see `KVStore`."""
        self._pool.store = KVStore(folder, num_bytes, self.model)

    def release(self) -> None:
        """Frees the caches and graphs that are kept between runs."""
        with self.models.lock:
            self._pool.clear()

    def close(self) -> None:
        """Ends all runs, after a step at most, and frees all; later calls raise `InputError`."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        self._worker.close()
        for run in [*memory.runs]:
            run.close()
        memory.clear()


def open_run(shape: MemoryShape, pool: MemoryPool, tokenizer: Tokenizer) -> Generation:
    """Starts a run of this shape that takes requests until it is closed."""
    make = partial(prepare, model=pool.models.target, tokenizer=tokenizer)
    return Generation([], shape, pool, make)
