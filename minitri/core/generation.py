"""The loop of the engine: a run turns requests into a stream of typed events.

A `Generation` computes only while its caller asks for the next event. A running request has a row
of the batch; at its end a waiting one gets the row. Each text follows the model's distribution.
The `Scheduler` chooses the work, the `Stack` of models does it. Legend: N tokens, V vocab.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from minitri.core.decoding.sampling import log_probs
from minitri.core.decoding.verification import Emitted
from minitri.core.errors import InputError, NotFiniteError
from minitri.core.memory import MemoryPool, computing, fault_of
from minitri.core.offload.streams import synchronize
from minitri.core.requests import End, Event, Idle, PrefillProgress, Request, RequestState
from minitri.core.scheduler import Scheduler
from minitri.core.shape import MemoryShape
from minitri.core.stack import Stack

CLOSED = "the engine is closed; load it again"


class Generation(Iterator[Event], AbstractContextManager["Generation"]):
    """A run of the engine: an iterator of events; `result` is its output, `close` ends it early."""

    _stack: Stack | None = None

    def __init__(
        self,
        rows: list[RequestState],
        shape: MemoryShape,
        pool: MemoryPool,
        prepare: Callable[[int, Request], RequestState] | None = None,
    ) -> None:
        """Starts a run of the requests in `rows`, with memory of this `shape` from `pool`.
        With `prepare(number, request)`, which makes a request's state, `submit` adds requests."""
        self.rows = rows
        self.shape = shape
        self._pool = pool
        self._prepare = prepare
        self._num_requests = len(rows)
        self._prefills: dict[int, Iterator[int]] = {}  # by row of the batch
        prompts = [state.prompt_ids for state in rows]
        settings = (shape, prompts, [state.request for state in rows])
        pool.models.target.execution.ranks.check_same("prompts, seeds or settings", settings)
        is_open = prepare is not None
        with computing(pool.models):
            self._stack = stack = Stack(pool.acquire(shape, prompts), shape, is_open=is_open)
        self.stats = stack.stats
        is_offloaded = stack.memory.full.is_hosted
        self._scheduler = Scheduler(rows, shape, is_open=is_open, is_offloaded=is_offloaded)
        self._events = self._run(stack)
        pool.runs.add(self)  # so that `Engine.close` ends it

    def __next__(self) -> Event:
        with computing(self._pool.models):
            try:
                return next(self._events)
            except BaseException as error:
                is_over = isinstance(error, StopIteration)
                # K and V stay after Ctrl-C or an open run's fault; a bug may half-write them.
                is_kept = is_over or not isinstance(error, Exception)
                if self._prepare and fault_of(error, self._pool.models):  # no memory, or NaN
                    is_kept = True
                self._end(is_kept=is_kept, was_interrupted=not is_over)
                raise

    def __del__(self) -> None:
        """Closes a run that is garbage-collected, unless another thread is computing."""
        models = self._pool.models
        is_held = self._stack is not None and os.getpid() == models.process
        if is_held and models.lock.acquire(blocking=False):
            try:
                self.close()
            finally:
                models.lock.release()

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the run and keeps its memory for the next; `next()` then raises `StopIteration`."""
        with computing(self._pool.models):
            self._events.close()
            self._end()

    def _end(self, *, is_kept: bool = True, was_interrupted: bool = False) -> None:
        """Ends the run; keeps its memory for the next if `is_kept`. `was_interrupted`: by error."""
        self._prefills.clear()
        if self._stack and is_kept:
            for b in self._scheduler.admitted:
                self._stack.retire(b)
            self._pool.put(self._stack.memory, was_interrupted=was_interrupted)
        self._stack = None

    def result(self) -> End:
        """Runs to the end; returns the only prompt's `End`. Raises `InputError` for several."""
        if len(self.rows) != 1:
            raise InputError(f"a result is of one prompt, got {len(self.rows)}; use results")
        return self.results()[0]

    def results(self) -> list[End]:
        """Runs to the end; returns one `End` per prompt, in their order. Raises `InputError`."""
        if self._prepare:
            raise InputError("this run has no end, as it stays open; iterate for its events")
        for _ in self:
            pass
        if any(state.finish_reason is None for state in self.rows):
            raise InputError("this run was closed before its end; start another")
        return [state.end(self.stats) for state in self.rows]

    def submit(self, request: Request) -> int:
        """Adds a request, between events, to a run of `Engine.open`; returns its number in events.
        Raises `InputError` for other runs, and if the request is too long."""
        if not self._prepare:
            raise InputError("this run takes no more requests; Engine.open starts one that does")
        state = self._prepare(self._num_requests, request)
        room = self.shape.generation.reserve
        num_tokens = len(state.prompt_ids) + request.generation.max_new_tokens
        if num_tokens > room:
            raise InputError(
                f"prompt and output are {num_tokens} tokens, but there is room for {room}; "
                "shorten the prompt, lower max_new_tokens, or reserve more"
            )
        self._num_requests += 1
        self._scheduler.add(state)
        return state.number

    def cancel(self, number: int) -> None:
        """Ends the request of this number early, between two events; no `End` follows."""
        self._scheduler.cancel(number)

    def _run(self, stack: Stack) -> Generator[Event, None, None]:
        """Yields events: in a loop admits requests to rows of `stack`, reads prompts, decodes."""
        while True:
            self._admit(stack)
            if not self._scheduler.admitted:
                if not self._prepare:  # no more requests can come
                    return
                yield Idle()
            active = stack.cascade.active
            can_decode = any(active)
            if (b := self._scheduler.next_to_read()) is not None:
                with self._timed("prefill_seconds"):
                    event = self._read_chunk(stack, b)
                yield event
            if self._scheduler.reads_first(active):
                continue
            if rows := self._scheduler.ready(active):
                with self._timed("prefill_seconds"):
                    emitted = stack.start(rows)
                yield from self._emit(stack, emitted)
            if can_decode:
                with self._timed("decode_seconds"):
                    emitted = stack.step()
                yield from self._emit(stack, emitted)

    @contextmanager
    def _timed(self, field: str) -> Iterator[None]:
        """Context that adds the seconds of its body, which must not yield, to `stats`'s `field`."""
        started = time.perf_counter()
        yield
        setattr(self.stats, field, getattr(self.stats, field) + time.perf_counter() - started)

    def _admit(self, stack: Stack) -> None:
        for b, old in [*self._scheduler.admitted.items()]:
            if old.finish_reason:
                self._remove(stack, b)
        while state := self._scheduler.next_request():
            free_rows = self._scheduler.free_rows
            b = stack.memory.prefix.best_row(free_rows, state.prompt_ids, state.request.owner)
            self._scheduler.admit(b, state)
            self._prefills[b] = stack.admit(b, state)

    def _remove(self, stack: Stack, b: int, *, is_sound: bool = True) -> None:
        stack.retire(b, is_sound=is_sound)
        self._scheduler.remove(b)
        del self._prefills[b]

    def _read_chunk(self, stack: Stack, b: int) -> PrefillProgress | End:
        state = self._scheduler.admitted[b]
        try:
            num_done = next(self._prefills[b])
            synchronize(stack.target.device)
        except (RuntimeError, MemoryError) as error:
            return self._fail(stack, b, error)
        num_tokens = len(state.prompt_ids)
        self._scheduler.note_read(b, num_tokens - num_done)
        return PrefillProgress(state.number, num_done, num_tokens, state.stats.num_cached_tokens)

    def _emit(self, stack: Stack, emitted: dict[int, Emitted]) -> Iterator[Event]:
        """Yields events of what each row of `stack` has `emitted`; removes rows that have ended."""
        eos = stack.target.config.eos_token_ids
        for b, state in [*self._scheduler.admitted.items()]:  # the oldest request first
            if not (new := emitted.get(b)):
                continue
            try:
                scores = self._scores(stack, b, state, new)
            except (RuntimeError, MemoryError, NotFiniteError) as error:
                yield self._fail(stack, b, error)
                continue
            for token, origin, score in zip(new.tokens, new.origins, scores, strict=True):
                if state.finish_reason:  # tokens after a stop are never shown
                    break
                self.stats.num_decoded_tokens += bool(state.tokens)  # but the first
                self.stats.num_generated_tokens += 1
                yield state.push(token, origin, eos, *score)
            if state.finish_reason not in (None, "cancelled"):
                self._remove(stack, b)
                yield state.end(self.stats)

    def _scores(self, stack: Stack, b: int, state: RequestState, new: Emitted) -> list[Any]:
        """Per `new` token (logprob, top_logprobs), () if not wanted. Raises if `new` is empty."""
        if not new.tokens:
            filters = stack.memory.runners["target"].text_filters[b]
            reason = filters.matcher.error if filters and filters.matcher else ""
            raise new.error or NotFiniteError(reason)
        num_top = state.request.generation.logprobs
        if num_top is None:
            return [()] * len(new.tokens)
        return log_probs(new.logits_NV, new.tokens, num_top)

    def _fail(self, stack: Stack, b: int, error: Exception) -> End:
        """Ends row b of an `Engine.open` run for lack of memory or NaN, else raises `error`."""
        fault = fault_of(error, self._pool.models)
        if not (fault and self._prepare):
            raise error
        state = self._scheduler.admitted[b]
        state.finish_reason = "failed"
        self._remove(stack, b, is_sound=not isinstance(error, NotFiniteError))
        return state.end(self.stats, fault)
