"""The engine: turns prompts into a stream of typed events.

    with minitri.load("smollm2-135m") as engine:  # see loader.py
        for event in engine.generate("Once upon a time", max_new_tokens=40, temperature=0.7):
            if isinstance(event, minitri.Token):
                print(event.text, end="", flush=True)

`generate` checks its input at once and returns a `Generation`, an iterator that works only while it
is asked for the next event. Nothing here prints.
"""

import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from minitri.errors import InputError, shorten
from minitri.fields import changed, check_names
from minitri.generation import Generation, running
from minitri.gpu.allocation import allocate_full_cache, most_rows
from minitri.loading.prompt_ids import Prompt, as_seeds, check_prompt, draw_seed, encode_prompts
from minitri.memory import MemoryShape
from minitri.requests import Completion, Event, Request, Row, expect
from minitri.resources import Resources
from minitri.runner import score
from minitri.settings import (
    MAX_ROWS,
    AllFields,
    CallSettings,
    GenerationConfig,
    RunFields,
    SamplingParams,
    SpeculationConfig,
    TextFields,
)

if TYPE_CHECKING:
    from minitri.loading.chat_template import Message
    from minitri.worker import Job

LEAST_ROOM = 4096
"""Tokens that rows of `agenerate` have room for, if the context has."""
ALONE = SpeculationConfig("autoregressive")


class Engine(Resources):
    """A model and its tokenizer, ready to generate any number of times, one after the other.

    It keeps the caches, and on a GPU the captured graphs, of the last run, until `release`. The
    next one starts after what its prompts have in common with those texts, and where it has the
    same settings and as many texts that are not longer, it captures nothing. Some attention kernels
    cut a cache by its size, so that there the last bits may depend on how long those texts were.

    Threads take turns at using one engine; a forked process cannot use it.
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (frozen)
        speculation: SpeculationConfig | bool = True,
        seed: int | Sequence[int] | None = None,
        **fields: Unpack[AllFields],
    ) -> Generation:
        """Starts a run over one prompt or several; each is a text or a list of token ids.

        `fields` such as `max_new_tokens=8`, `temperature=0.7` or `method="triforce"` take the
        places of those of `sampling`, `generation` and `speculation`; with `speculation` False
        nothing is guessed. Without a `seed` each row draws one, which its `End` tells, and what is
        open of the speculation follows the clock. A single `seed` gives row b the seed `seed + b`.
        A row's tokens depend on its own prompt and seed alone, up to the last bits of the
        arithmetic; but where method or gammas are open, at a temperature above 0 and uncoupled,
        rows share the autotuner's choices. Raises `InputError` here, before any work, if a prompt
        is empty, too long, or has tokens outside the vocabulary.
        """
        return self._run(*self._asked(prompts, sampling, generation, speculation, seed, **fields))

    def chat(
        self, messages: "str | Sequence[Message]", **settings: Unpack[CallSettings]
    ) -> Generation:
        """Starts a run over the answer to a conversation, as `generate` does: a list of messages
        such as `{"role": "user", "content": "Why?"}`, or the user's only one. Raises `InputError`,
        also if the model is not made for conversations."""
        return self.generate(self.tokenizer.encode_chat(messages), **settings)

    def complete(self, prompt: Prompt, **settings: Unpack[CallSettings]) -> Completion:
        """All that a model says after one prompt; `settings` are those of `generate`."""
        return self.generate(prompt, **settings).result()

    async def agenerate(
        self, prompt: Prompt, **settings: Unpack[CallSettings]
    ) -> AsyncGenerator[Event, None]:
        """For asyncio, the events of one prompt: `async for event in engine.agenerate("Once")`;
        `settings` are those of `generate`.

        A thread computes. Those that are asked for at once run next to each other, as rows of one
        batch by whose numbers events name them; those beyond `MAX_ROWS` wait, as do those that need
        another run. Leaving the loop, or cancelling the task, ends the text. What is open of the
        speculation follows the clock, also with a seed, which repeats its text with `coupled=True`.
        Raises `InputError` at the first event.
        """
        import asyncio  # takes a while, like the worker

        from minitri.worker import Worker

        requests, _, speculation = await asyncio.to_thread(self._asked, prompt, **settings)
        if len(requests) != 1 or self._pool.models.target.execution.ranks.count > 1:
            raise InputError("agenerate takes one prompt, on a model of one process; use generate")
        await asyncio.to_thread(self._make_row, 0, requests[0])  # checks it
        if self._worker is None:
            self._worker = Worker(self._open_for, self._suits)
        speculation = dataclasses.replace(speculation, timed=not speculation.coupled)
        async with contextlib.aclosing(self._worker.events(requests[0], speculation)) as events:
            async for event in events:
                yield event

    async def achat(
        self, messages: "str | Sequence[Message]", **settings: Unpack[CallSettings]
    ) -> AsyncGenerator[Event, None]:
        """`chat` for asyncio; see `agenerate`."""
        import asyncio

        prompt = await asyncio.to_thread(self.tokenizer.encode_chat, messages)
        async with contextlib.aclosing(self.agenerate(prompt, **settings)) as events:
            async for event in events:
                yield event

    def score(self, text: Prompt) -> Tensor:
        """How likely the model finds a text, read once: the natural logarithms of the probabilities
        of its tokens but for the first, (N - 1,) float32 on the CPU, before temperature and filters
        (`tokenizer.encode` tells the N tokens). Raises `InputError`."""
        ids = self._make_row(0, Request(text, 0, max_new_tokens=1)).prompt
        if len(ids) < 2:
            raise InputError("the text is one token, after which nothing is scored; give more")
        run = GenerationConfig(1)
        with running(self._pool.models):
            full = allocate_full_cache(self.model, None, run, ALONE, [len(ids)], len(ids))
            return score(self.model, ids, full, chunk=run.prefill_chunk)

    def stream(
        self,
        requests: Iterable[Request],
        *,
        batch_size: int = MAX_ROWS,
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (frozen)
        speculation: SpeculationConfig | bool = True,
        **fields: Unpack[RunFields],
    ) -> Generation:
        """Starts a run over any number of requests, at most `batch_size` of them at a time, fewer
        where memory is short.

        Events name requests by their numbers, from 0 on. Of `generation` counts what is of a run,
        such as `prefill_chunk`, for which `fields` are, too; like the method. Raises `InputError`
        before any work, and names the request.
        """
        _check_size(batch_size)
        check_names(fields, RunFields.__annotations__, TextFields.__annotations__)
        listed = list(requests)
        if not listed:
            raise InputError("there are no requests; give at least one")
        generation = changed(generation, fields)
        return self._run(listed, generation, _as_config(speculation, fields), batch_size)

    def open(
        self,
        *,
        batch_size: int = MAX_ROWS,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        generation: GenerationConfig = GenerationConfig(reserve=4096),  # noqa: B008 (frozen)
        speculation: SpeculationConfig | bool = True,
        **fields: Unpack[RunFields],
    ) -> Generation:
        """Starts a run without requests, which goes on until it is closed: see `Generation.submit`.

        A row has room for `generation.reserve` tokens, prompt and output. With captured graphs
        requests must have filters of the kinds that `sampling` has, or temperature 0; those whose
        numbers differ wait for one another; `fields` are those of `stream`. Raises `InputError` if
        there is no room.
        """
        check_names(fields, RunFields.__annotations__, TextFields.__annotations__)
        generation = changed(generation, fields)
        room = generation.reserve
        _check_size(batch_size)
        if not 1 < room <= self.config.context_length:
            raise InputError(
                f"reserve is {room} tokens; give from 2 to {self.config.context_length}, the "
                f"context of {self.config.name}"
            )
        run = dataclasses.replace(generation, max_new_tokens=1)
        shape = MemoryShape((1,) * batch_size, sampling, run, _as_config(speculation, fields))
        make_row = functools.partial(self._make_row, shape=shape)
        return Generation([], shape, self._pool, make_row)

    def _asked(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (frozen)
        speculation: SpeculationConfig | bool = True,
        seed: int | Sequence[int] | None = None,
        **fields: Unpack[AllFields],
    ) -> tuple[list[Request], GenerationConfig, SpeculationConfig]:
        """A request for each prompt of `generate`, and settings of their run."""
        check_names(fields, AllFields.__annotations__)
        expect(sampling, SamplingParams)
        expect(generation, GenerationConfig)
        ids = encode_prompts(prompts, self.tokenizer)
        seeds = [None] * len(ids) if seed is None else as_seeds(seed, len(ids))
        sampling, generation = changed(sampling, fields), changed(generation, fields)
        pairs = zip(ids, seeds, strict=True)
        requests = [Request(tokens, own, sampling, generation) for tokens, own in pairs]
        return requests, generation, _as_config(speculation, fields)

    def _run(
        self,
        requests: list[Request],
        run: GenerationConfig,
        speculation: SpeculationConfig,
        batch_size: int | None = None,
    ) -> Generation:
        """At most `batch_size` at a time, as far as memory allows; None: all at once."""
        pool = self._pool
        if all(isinstance(it, Request) and it.seed is None for it in requests):
            speculation = dataclasses.replace(speculation, timed=True)
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
            lengths = lengths[: self._most_rows(run, speculation, lengths)]
        sampling = self._captured_filters([request.sampling for request in requests], run)
        shape = MemoryShape(tuple(lengths), sampling, run, speculation)
        return Generation(rows, shape, pool)

    def _most_rows(
        self, run: GenerationConfig, speculation: SpeculationConfig, lengths: list[int]
    ) -> int:
        draft = self.draft.config if self.draft else None
        host = self._pool.host.num_free_bytes
        return most_rows(self.model, draft, run, speculation, lengths, host)

    def _open_for(self, job: "Job") -> Generation:
        """An open run for a request of `agenerate`, with room for longer ones."""
        asked, speculation = job.request.generation, job.speculation or ALONE
        num_tokens = len(job.request.prompt) + asked.max_new_tokens
        room = max(asked.reserve, LEAST_ROOM, 1 << (num_tokens - 1).bit_length())
        run = asked.for_run(min(room, self.config.context_length))
        num_rows = self._most_rows(run, speculation, [room] * MAX_ROWS)
        how: dict[str, Any] = {"generation": run, "speculation": speculation}
        return self.open(batch_size=num_rows, sampling=job.request.sampling, **how)

    def _suits(self, run: Generation, job: "Job") -> bool:
        """Whether a request of `agenerate` may join a run."""
        wanted = job.request.generation.for_run(run.shape.generation.reserve), job.speculation
        if wanted != (run.shape.generation, run.shape.speculation):
            return False
        try:
            self._make_row(0, job.request, run.shape)
        except InputError:
            return False
        return True

    def _make_row(self, number: int, request: Request, shape: MemoryShape | None = None) -> Row:
        """A request, checked, also by the shape of an open run."""
        expect(request, Request)
        [ids] = encode_prompts([request.prompt], self.tokenizer)
        check_prompt(ids, self.config, request.generation.max_new_tokens)
        expect(request.speculation, bool)
        if (seed := request.seed) is None:
            seed = self.model.execution.ranks.ask_first(draw_seed)
        request = dataclasses.replace(request, seed=as_seeds([seed], 1)[0])
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


def _as_config(
    speculation: SpeculationConfig | bool, fields: Mapping[str, Any]
) -> SpeculationConfig:
    """What to speculate: settings, the default ones, or nothing; but for these fields."""
    if isinstance(speculation, bool):
        speculation = SpeculationConfig("auto") if speculation else ALONE
    expect(speculation, SpeculationConfig)
    return changed(speculation, fields)


def _check_size(batch_size: int) -> None:
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size is {shorten(repr(batch_size), 60)}; it must be at least 1")
