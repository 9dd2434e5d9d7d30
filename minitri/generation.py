"""A run in progress: requests become a stream of typed events.

A `Generation` works only while it is asked for the next event; stop asking, or call `close`, at any
moment. Some requests run at a time, as rows of a batch, and the others wait: where a text ends, the
next one takes its place. Prompts are read in chunks, between the steps of rows that are further on,
and rows are decoded together, step by step of a cascade (`decoding/cascade.py`), whose tokens are
cut here at the end of a text. It knows neither files nor flags, and nothing here prints.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Self

import torch

from minitri.decoding.level import Emitted
from minitri.decoding.verification import NotFiniteError
from minitri.errors import InputError, shorten
from minitri.events import CANCELLED, Batch, End, Event, Idle, PrefillProgress, Request, Row, Token
from minitri.gpu.streams import synchronize
from minitri.model.llama import Llama
from minitri.reuse.pool import SessionPool
from minitri.runner import LogProbs
from minitri.session import Session


@contextlib.contextmanager
def running(model: Llama) -> Iterator[None]:
    """Makes a model's device the current one; turns what may fail there into an `InputError`."""
    on_gpu = model.device.type == "cuda"
    try:
        with torch.cuda.device(model.device) if on_gpu else contextlib.nullcontext():
            yield
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"{model.device} has run out of memory ({shorten(error, 90)}); shorten the prompt, or "
            "lower max_new_tokens or prefill_chunk"
        ) from None
    except NotFiniteError:
        is_wide = model.dtype == torch.float32
        advice = "get them again" if is_wide else "or overflow it: try --dtype float32"
        raise InputError(
            f"{model.config.name} computed logits that are not finite in {model.dtype}; the "
            f"weights are damaged, {advice}"
        ) from None


class Generation(Iterator[Event]):
    """A run in progress: iterate for its events, read `stats` at any time; `close`, or the end of a
    with statement, ends it."""

    def __init__(
        self, rows: list[Row], batch: Batch, pool: SessionPool,
        make_row: Callable[[int, Request], Row] | None = None,
    ) -> None:  # fmt: skip
        """Takes models and memory for the run from the `pool`; returns the memory at the end.

        The memory is made for `batch`: as many rows as run at a time, none of them shorter than
        another one that will take its place. With `make_row`, which checks a request with its
        number, the run goes on until it is closed.
        """
        self._model, self.rows, self._make_row = pool.target, rows, make_row
        self._waiting, self._num_requests = deque(rows), len(rows)
        self._running: dict[int, Row] = {}  # by their places in the batch
        self._reading: dict[int, Iterator[PrefillProgress]] = {}
        with torch.inference_mode(), running(self._model):
            session = pool.open(batch)
        self.stats = session.stats
        self._events = self._run(session, pool)  # this alone holds the session

    def __next__(self) -> Event:
        with torch.inference_mode(), running(self._model):
            return next(self._events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        states = (
            f"{len(row.token_ids)} tokens, {row.finish_reason or 'open'}" for row in self.rows
        )
        return f"<Generation of {self._model.config.name}: {'; '.join(states)}>"

    def submit(self, request: Request) -> int:
        """Adds a request to a run that stays open; returns its number, by which events name it.

        Call it between two events. Raises `InputError` if the request is wrong.
        """
        if self._make_row is None:
            raise InputError("this run takes no more requests; Engine.open starts one that does")
        row = self._make_row(self._num_requests, request)
        self._num_requests += 1
        self._waiting.append(row)
        return row.number

    def cancel(self, number: int) -> None:
        """Ends a request before its time, if it has not ended; no `End` follows. Call it between
        two events."""
        for row in (*self._waiting, *self._running.values()):
            if row.number == number:
                row.finish_reason = CANCELLED

    def close(self) -> None:
        """Ends the run and gives up its memory; further events raise `StopIteration`."""
        with torch.inference_mode(), running(self._model):
            self._events.close()

    def _run(self, session: Session, pool: SessionPool) -> Generator[Event, None, None]:
        try:
            while True:
                self._admit(session)
                if self._running:
                    yield from self._advance(session)
                elif self._make_row is not None:
                    yield Idle()
                elif not self._waiting:
                    break
        except (GeneratorExit, KeyboardInterrupt) as error:
            # After other errors the session is not kept.
            session.is_broken = isinstance(error, KeyboardInterrupt)
            for b in self._running:
                session.retire(b)
            pool.put(session)
            raise
        pool.put(session)

    def _admit(self, session: Session) -> None:
        """Gives the free places to waiting requests; cancelled ones go."""
        for b, row in list(self._running.items()):
            if row.finish_reason is not None:
                self._leave(session, b)
        while self._waiting:
            row = self._waiting[0]
            places = [b for b in range(len(session.sequences)) if b not in self._running]
            sampling = {it.request.sampling for it in self._running.values()}
            must_wait = session.samples_alike and sampling - {row.request.sampling}
            if row.finish_reason is None and (must_wait or not places):
                return
            self._waiting.popleft()
            if row.finish_reason is None:
                b = session.prefix.best_place(places, row.prompt)
                request, self._running[b] = row.request, row
                session.admit(
                    b, row.prompt, request.seed, request.sampling, speculation=request.speculation
                )
                wants_logprobs = request.generation.logprobs is not None
                session.target.keeps_logits = session.target.keeps_logits or wants_logprobs
                self._reading[b] = self._prefill(row, b, session)

    def _leave(self, session: Session, b: int) -> None:
        """Row b is free for another request."""
        session.retire(b)
        del self._running[b]
        self._reading.pop(b, None)

    def _advance(self, session: Session) -> Iterator[Event]:
        """Reads prompts, or makes a step; shows what that gave."""
        is_whole = session.full.on_chip == self._model.config.num_layers
        active = session.cascade.active
        is_short = is_whole and (any(active) or self._make_row is not None)
        ready = yield from self._read(only_a_chunk=is_short)
        if not (ready or any(active)):
            return
        started = time.perf_counter()
        with self.stats.apart() if ready else contextlib.nullcontext():
            emitted = session.start(ready) if ready else session.step()
        seconds = time.perf_counter() - started
        rows = [row.stats for b, row in self._running.items() if emitted[b].tokens]
        for row in rows:
            row.num_steps += 1
        every: list[Any] = [self.stats, *rows]
        for stats in every:
            if ready:  # the first tokens are a part of the prefill
                stats.prefill_seconds += seconds
            else:
                stats.decode_seconds += seconds
        yield from self._emit(session, emitted)

    def _read(self, *, only_a_chunk: bool) -> Generator[PrefillProgress, None, list[int]]:
        """Reads prompts: all of them to their ends, or a single chunk of one.

        Returns the places of those that have been read.
        """
        ready = []
        for b, prompt in list(self._reading.items()):
            for event in prompt:
                yield event
                if event.num_done == event.num_tokens:
                    del self._reading[b]
                    ready.append(b)
                    break
                if only_a_chunk:
                    break
            if only_a_chunk:
                break
        return ready

    def _prefill(self, row: Row, b: int, session: Session) -> Iterator[PrefillProgress]:
        """Reads a prompt in chunks. `Cascade.start` reads its last token, reported here as read."""
        stats, num_tokens, started = self.stats, len(row.prompt), time.perf_counter()
        done = row.stats.num_cached_tokens = session.reuse(b)
        chunks = session.prefill(b)
        while done < num_tokens:
            end = next(chunks, num_tokens - 1)
            synchronize(self._model.device)
            read, done = done, num_tokens if end == num_tokens - 1 else end
            seconds = time.perf_counter() - started
            stats.num_prefilled_tokens += done - read
            stats.prefill_seconds += seconds
            row.stats.prefill_seconds += seconds
            yield PrefillProgress(row.number, done, num_tokens, row.stats.num_cached_tokens)
            started = time.perf_counter()

    def _emit(self, session: Session, emitted: list[Emitted]) -> Iterator[Event]:
        """Shows the new tokens row by row; rows that have ended leave the batch."""
        eos = self._model.config.eos_token_ids
        for b, row in list(self._running.items()):
            tokens, num_top = emitted[b].tokens, row.request.generation.logprobs
            scores: list[LogProbs | tuple[None, tuple[()]]] = [(None, ())] * len(tokens)
            if num_top is not None and tokens:
                scores = [*session.target.log_probs(b, tokens, num_top)]
            for token, origin, score in zip(tokens, emitted[b].origins, scores, strict=True):
                if row.finish_reason is None:
                    self.stats.num_decoded_tokens += bool(row.token_ids)
                    self.stats.num_generated_tokens += 1
                    text = row.push(token, origin, eos)
                    yield Token(row.number, token, text, origin, *score)
                if row.finish_reason is not None:  # ended, or was cancelled meanwhile
                    self._leave(session, b)
                    if row.finish_reason != CANCELLED:
                        ids, reason = tuple(row.token_ids), row.finish_reason
                        yield End(row.number, reason, row.text, ids, self.stats, row.stats)
                    break
