"""A run in progress: requests become a stream of typed events.

A `Generation` works only while it is asked for the next event. Some requests run at a time, as rows
of a batch; where a text ends, the next one takes its place. Prompts are read in chunks, between the
steps of rows that are further on.
"""

import time
from collections import Counter, deque
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, Self

from torch import Tensor

from minitri.core.decoding.level import Emitted
from minitri.core.decoding.sampling import log_probs
from minitri.core.errors import InputError, NotFiniteError
from minitri.core.fields import expect
from minitri.core.graphs import filters_of
from minitri.core.memory import MemoryPool, as_fault, running
from minitri.core.model.llama import Llama
from minitri.core.offload.streams import synchronize
from minitri.core.requests import CANCELLED, End, Event, Idle, PrefillProgress, Request, Row
from minitri.core.shape import MemoryShape
from minitri.core.stack import Stack
from minitri.text.filters import text_filters
from minitri.text.prompt_ids import as_seeds, check_prompt, draw_seed, encode_prompt
from minitri.text.tokenizer import Tokenizer

CLOSED = "the engine is closed; load it again"
TURN_OF_OLDEST = 4
"""Of so many chunks of prompts one is of the oldest, and of so many requests that get a place."""


class Generation(Iterator[Event]):
    """A run in progress: iterate for its events, read `stats` at any time, `close` it; or ask for
    its `result`."""

    def __init__(
        self,
        rows: list[Row],
        shape: MemoryShape,
        pool: MemoryPool,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Takes memory of this shape from the `pool` until its end. With a `tokenizer` it takes
        more requests, until it is closed."""
        self._pool = pool
        self.shape = shape
        self._model = pool.models.target
        self.rows = rows
        self._tokenizer = tokenizer
        self._is_open = tokenizer is not None
        self._waiting = deque(rows)
        self._num_requests = len(rows)
        self._running: dict[int, Row] = {}  # by their places in the batch
        self._reading: dict[int, Iterator[PrefillProgress]] = {}
        self._num_left: dict[int, int] = {}  # tokens of these
        self._num_chunks = 0
        self._num_admitted = 0
        self._turns: dict[str, tuple[int, int]] = {}  # by clients: latest, and how many
        prompts = [row.prompt for row in rows]
        asked = (shape, prompts, [row.request for row in rows])
        self._model.execution.ranks.check_same("prompts, seeds or settings", asked)
        with running(pool.models):
            stack = Stack(pool.open(shape, prompts), shape, is_open=self._is_open)
        self.stats = stack.stats
        self._events = self._run(stack)  # this alone holds the memory
        next(self._events)
        pool.runs.add(self)

    def __next__(self) -> Event:
        with running(self._pool.models):
            return next(self._events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def result(self) -> End:
        """The whole output of the only prompt; runs to the end. Raises `InputError`."""
        if len(self.rows) != 1:
            raise InputError(f"a result is of one prompt, got {len(self.rows)}; use results")
        return self.results()[0]

    def results(self) -> list[End]:
        """The whole outputs in the order of the prompts; runs to the end. Raises `InputError` if
        the run was closed before."""
        if self._is_open:
            raise InputError("this run has no end, as it stays open; iterate for its events")
        for _ in self:
            pass
        if any(row.finish_reason is None for row in self.rows):
            raise InputError("this run was closed before its end; start another")
        return [row.end(self.stats) for row in self.rows]

    def submit(self, request: Request) -> int:
        """Adds a request, between two events; returns its number, by which events name it. Raises
        `InputError` if there is no room for it, or if what is captured has other filters."""
        if self._tokenizer is None:
            raise InputError("this run takes no more requests; Engine.open starts one that does")
        row = make_row(self._num_requests, request, self._model, self._tokenizer)
        run = self.shape.generation
        num_tokens = len(row.prompt) + request.generation.max_new_tokens
        if num_tokens > run.reserve:
            raise InputError(
                f"prompt and output are {num_tokens} tokens, but there is room for {run.reserve}; "
                "shorten the prompt, lower max_new_tokens, or reserve more"
            )
        captured = replace(self.shape.sampling, temperature=1.0)  # it has a form, too
        filters_of([captured, request.sampling], self._model, run)
        row.arrived = self._num_admitted
        self._num_requests += 1
        self._waiting.append(row)
        return row.number

    def cancel(self, number: int) -> None:
        """Ends a request before its time, between two events; no `End` follows."""
        self._waiting = deque(row for row in self._waiting if row.number != number)
        for row in self._running.values():
            if row.number == number:
                row.finish_reason = CANCELLED

    def close(self) -> None:
        """Ends the run and gives up its memory; further events raise `StopIteration`."""
        with running(self._pool.models):
            self._events.close()

    def _run(self, stack: Stack) -> Generator[Event, None, None]:
        try:
            yield Idle()  # whatever ends the run from here on gives its memory back
            while True:
                self._admit(stack)
                if self._running:
                    yield from self._advance(stack)
                elif self._is_open:
                    yield Idle()
                else:
                    break
        except BaseException as stop:
            # After errors the memory is not kept, unless it was short: the next run needs the same.
            is_shortage = self._is_open and as_fault(stop, self._pool.models) is not stop
            if is_shortage or not isinstance(stop, Exception):
                for b in self._running:
                    stack.retire(b)
                self._pool.put(stack.memory, was_interrupted=not isinstance(stop, GeneratorExit))
            raise
        self._pool.put(stack.memory)

    def _admit(self, stack: Stack) -> None:
        """Gives free places to waiting requests; cancelled ones go."""
        for b, old in list(self._running.items()):
            if old.finish_reason is not None:
                self._leave(stack, b)
        memory = stack.memory
        places = {*range(memory.shape.num_rows)} - self._running.keys()
        while places and (row := self._next_waiting(memory.shape.num_rows)) is not None:
            sampling = {it.request.sampling for it in self._running.values()}
            if memory.graphs is not None and sampling - {row.request.sampling}:  # one for all
                break
            self._waiting.remove(row)
            self._num_admitted += 1
            _, count = self._turns.get(row.request.client, (0, 0))
            self._turns[row.request.client] = self._num_admitted, count + 1
            b = memory.prefix.best_place(sorted(places), row.prompt, row.request.owner)
            places.remove(b)
            self._running[b] = row
            own = (row.request.sampling, row.prompt, row.tokenizer, self._model.config)
            stack.admit(b, row.prompt, row.request, text_filters(*own))
            self._reading[b] = self._prefill(row, b, stack)
            self._num_left[b] = len(row.prompt)

    def _next_waiting(self, num_places: int) -> Row | None:
        """The first whose client has the fewest rows, or waits longest; in an open run mostly the
        shortest of those, and long prompts, which wait for each other, have half of the places."""
        num_rows = Counter(row.request.client for row in self._running.values())
        waiting = [*self._waiting]
        clients = num_rows.keys() | {row.request.client for row in waiting}
        self._turns = {it: turn for it, turn in self._turns.items() if it in clients}
        limit = self.shape.generation.shared_chunk
        num_long = sum(self._num_left[b] > limit for b in self._reading)
        if self._is_open and num_long >= max(1, num_places // 2):
            waiting = [row for row in waiting if len(row.prompt) <= limit]

        def rank(row: Row) -> tuple[int, ...]:
            turn, count = self._turns.get(row.request.client, (row.arrived, 0))
            is_turn = not (self._is_open and count % TURN_OF_OLDEST)
            return num_rows[row.request.client], turn, 0 if is_turn else len(row.prompt)

        return min(waiting, key=rank, default=None)

    def _leave(self, stack: Stack, b: int, *, is_sound: bool = True) -> None:
        stack.retire(b, is_sound=is_sound)
        del self._running[b]
        self._reading.pop(b, None)

    def _advance(self, stack: Stack) -> Iterator[Event]:
        """Reads a chunk of a prompt, starts the rows that are read, and makes a step of those that
        were further on. In a run that takes no more requests, prompts are read to their ends first
        where nothing else runs meanwhile, and into host memory."""
        active = stack.cascade.active
        are_further_on = any(active)
        if self._reading:
            yield self._read_chunk(stack)
            is_on_device = stack.memory.full.on_chip == self._model.config.num_layers
            may_wait = self._is_open or (is_on_device and are_further_on)
            if self._reading and not may_wait:
                return
        ready = [b for b in self._running if not active[b] and b not in self._reading]
        if ready:
            started = time.perf_counter()
            emitted = stack.start(ready)
            self.stats.prefill_seconds += time.perf_counter() - started
            yield from self._emit(stack, emitted)
        if any(active) and (are_further_on or not ready):
            started = time.perf_counter()
            emitted = stack.step()
            self.stats.decode_seconds += time.perf_counter() - started
            yield from self._emit(stack, emitted)

    def _fail(self, stack: Stack, b: int, error: Exception) -> End:
        """Ends row b alone; raises a bug, and any error in a run that takes no more requests."""
        fault = as_fault(error, self._pool.models)
        if fault is error or not self._is_open:
            raise error
        row = self._running[b]
        row.finish_reason = "failed"
        self._leave(stack, b, is_sound=not isinstance(error, NotFiniteError))
        return row.end(self.stats, fault)

    def _read_chunk(self, stack: Stack) -> PrefillProgress | End:
        """Reads on in the oldest prompt; in a run that takes requests mostly in that of which the
        least is left, so that a short one does not wait for a long one."""
        self._num_chunks += 1
        b = next(iter(self._reading))
        if self._is_open and self._num_chunks % TURN_OF_OLDEST:
            b = min(self._reading, key=self._num_left.__getitem__)
        try:
            progress = next(self._reading[b])
        except (RuntimeError, MemoryError) as error:
            return self._fail(stack, b, error)
        self._num_left[b] = progress.num_tokens - progress.num_done
        if not self._num_left[b]:
            del self._reading[b]
        return progress

    def _prefill(self, row: Row, b: int, stack: Stack) -> Iterator[PrefillProgress]:
        started = time.perf_counter()

        def score(logits_NV: Tensor, tokens: list[int]) -> None:
            row.prompt_scores += log_probs(logits_NV, tokens, row.request.generation.logprobs or 0)

        chunks = stack.prefill(b, score if row.request.score_prompt else None)
        done = num_cached = row.stats.num_cached_tokens = next(chunks)
        for end in chunks:
            synchronize(self._model.device)
            self.stats.num_prefilled_tokens += end - done
            self.stats.prefill_seconds += time.perf_counter() - started
            done = end
            yield PrefillProgress(row.number, done, len(row.prompt), num_cached)
            started = time.perf_counter()

    def _emit(self, stack: Stack, emitted: dict[int, Emitted]) -> Iterator[Event]:
        """Shows new tokens row by row; rows that have ended leave the batch."""
        eos = self._model.config.eos_token_ids
        for b, row in list(self._running.items()):
            if b not in emitted:
                continue
            new = emitted[b]
            num_top = row.request.generation.logprobs
            scores: list[Any] = [()] * len(new.tokens)
            try:
                if not new.tokens:
                    filters = stack.memory.target.text_filters[b]
                    matcher = filters.matcher if filters is not None else None
                    raise new.error or NotFiniteError(matcher.error if matcher else "")
                if num_top is not None:
                    scores = log_probs(new.logits_NV, new.tokens, num_top)
            except (RuntimeError, MemoryError, NotFiniteError) as error:
                yield self._fail(stack, b, error)
                continue
            for token, origin, score in zip(new.tokens, new.origins, scores, strict=True):
                if row.finish_reason is not None:
                    break
                self.stats.num_decoded_tokens += bool(row.tokens)
                self.stats.num_generated_tokens += 1
                yield row.push(token, origin, eos, *score)
            if row.finish_reason not in (None, CANCELLED):
                self._leave(stack, b)
                yield row.end(self.stats)


def make_rows(requests: list[Request], model: Llama, tokenizer: Tokenizer) -> list[Row]:
    """Those of a run. Raises `InputError`, which names the request if there are several."""
    rows = []
    for number, request in enumerate(requests):
        try:
            rows.append(make_row(number, request, model, tokenizer))
        except InputError as error:
            where = f"request {number}: " if len(requests) > 1 else ""
            raise InputError(f"{where}{error}") from None
    return rows


def make_row(number: int, request: Request, model: Llama, tokenizer: Tokenizer) -> Row:
    """The row of a request, which is checked. Raises `InputError`."""
    expect(request, Request)
    expect(request.speculation, bool)
    expect(request.owner, str)
    expect(request.client, str)
    expect(request.score_prompt, bool)
    ids = encode_prompt(request.prompt, tokenizer)
    check_prompt(ids, model.config, request.generation.max_new_tokens)
    draw = model.execution.ranks.ask_first
    [seed] = as_seeds([draw(draw_seed) if request.seed is None else request.seed], 1)
    text_filters(request.sampling, [], tokenizer, model.config)  # a check: its own come with it
    return Row(number, replace(request, seed=seed), ids, tokenizer)
