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
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Self

import torch

from minitri.decoding.level import Emitted
from minitri.decoding.verification import NotFiniteError
from minitri.errors import InputError, shorten
from minitri.gpu.pool import SessionPool
from minitri.gpu.streams import synchronize
from minitri.loading.prompts import Prompt
from minitri.loading.stopping import StopScanner
from minitri.loading.tokenizer import IncrementalDecoder, Tokenizer
from minitri.model.llama import Llama
from minitri.session import Batch, Session
from minitri.settings import GenerationConfig, SamplingParams
from minitri.stats import Stats


@dataclass(frozen=True)
class Request:
    """A text to go on with, and how."""

    prompt: Prompt
    """A text or token ids."""
    seed: int = 0
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen)
    generation: GenerationConfig = GenerationConfig()  # noqa: RUF009 (frozen)
    """Of these `max_new_tokens`, `stop` and `ignore_eos`; the rest is of a run, not of a text."""


@dataclass(frozen=True)
class PrefillProgress:
    """A chunk of a prompt has been read."""

    row: int
    """Number of the request, like that of all events."""
    num_done: int
    """Tokens of this prompt read so far."""
    num_tokens: int
    """Tokens of this prompt."""


@dataclass(frozen=True)
class Token:
    """A new token of one row."""

    row: int
    token_id: int
    text: str
    """Text that became certain with this token; empty while a character or a possible stop string
    is incomplete."""
    origin: str
    """Where it came from: the stage that guessed it, `draft` or `retrieval` (or `lookup`, where it
    takes turns with a drafter's model), or the target itself, `recovered` or `bonus`."""


@dataclass(frozen=True)
class End:
    """One row is finished; the others go on."""

    row: int
    finish_reason: str
    """`eos`, `stop` or `length`."""
    text: str
    """All text of the row: that of its `Token` events put together."""
    token_ids: tuple[int, ...]
    """All tokens generated, an end-of-sequence token included."""
    stats: Stats = field(repr=False)
    """The statistics of the whole batch, live."""


@dataclass(frozen=True)
class Completion:
    """The whole output of one prompt; see `Engine.complete`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Stats = field(repr=False)


Event = PrefillProgress | Token | End


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


class Row:
    """The output of one request: its tokens, its text, and whether it is done."""

    def __init__(self, number: int, request: Request, ids: list[int], tokenizer: Tokenizer) -> None:
        self.number = number
        self.request = request
        self.prompt = ids
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._decoder = IncrementalDecoder(tokenizer, ids)
        self._scanner = StopScanner(request.generation.stop)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    def push(self, token: int, eos: tuple[int, ...]) -> str:
        """Takes in a token; returns the text that may be shown now. Sets `finish_reason`."""
        self.token_ids.append(token)
        if token in eos and not self.request.generation.ignore_eos:
            self.finish_reason = "eos"
            fresh = self._scanner.push(self._decoder.flush())
        else:
            fresh = self._scanner.push(self._decoder.push(token))
            if (
                not self._scanner.found
                and len(self.token_ids) == self.request.generation.max_new_tokens
            ):
                self.finish_reason = "length"
                fresh += self._scanner.push(self._decoder.flush())
        if self._scanner.found:
            self.finish_reason = "stop"
        elif self.finish_reason:
            fresh += self._scanner.flush()
        self.text += fresh
        return fresh


class Generation(Iterator[Event]):
    """A run in progress: iterate for its events, read `stats` at any time; `close`, or the end of a
    with statement, ends it."""

    def __init__(self, rows: list[Row], batch: Batch, pool: SessionPool) -> None:
        """Takes models and memory for the run from the `pool`; returns the memory at the end.

        The memory is made for `batch`: as many rows as run at a time, none of them shorter than
        another one that will take its place.
        """
        self._model, self.rows = pool.target, rows
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

    def close(self) -> None:
        """Ends the run and gives up its memory; further events raise `StopIteration`."""
        self._events.close()

    def _run(self, session: Session, pool: SessionPool) -> Generator[Event, None, None]:
        cascade, waiting = session.cascade, deque(self.rows)
        rows: dict[int, Row] = {}  # by their places in the batch
        reading: dict[int, Iterator[PrefillProgress]] = {}
        try:
            while waiting or rows:
                for b in range(len(cascade.active)):
                    if waiting and b not in rows:
                        rows[b] = row = waiting.popleft()
                        session.admit(b, row.prompt, row.request.seed, row.request.sampling)
                        reading[b] = self._prefill(row, b, session)
                is_whole = session.full.on_chip == self._model.config.num_layers
                ready = yield from _read(reading, cascade.active if is_whole else [])
                emitted = self._start(session, ready) if ready else self._step(session)
                yield from self._emit(session, rows, emitted)
        except GeneratorExit:  # closed; after any other error the session is not kept
            pool.put(session)
            raise
        pool.put(session)

    def _prefill(self, row: Row, b: int, session: Session) -> Iterator[PrefillProgress]:
        """Reads a prompt in chunks. `Cascade.start` reads its last token, reported here as read."""
        stats, num_tokens = self.stats, len(row.prompt)
        chunks, done = session.prefill(b), 0
        while done < num_tokens:
            started = time.perf_counter()
            end = next(chunks, num_tokens - 1)
            synchronize(self._model.device)
            read, done = done, num_tokens if end == num_tokens - 1 else end
            stats.num_prefilled_tokens += done - read
            stats.prefill_seconds += time.perf_counter() - started
            yield PrefillProgress(row.number, done, num_tokens)

    def _start(self, session: Session, ready: list[int]) -> list[Emitted]:
        """The first tokens of rows whose prompts have been read: a part of the prefill."""
        stats, started = self.stats, time.perf_counter()
        with stats.apart():
            emitted = session.start(ready)
        stats.prefill_seconds += time.perf_counter() - started
        return emitted

    def _step(self, session: Session) -> list[Emitted]:
        started = time.perf_counter()
        emitted = session.step()
        self.stats.decode_seconds += time.perf_counter() - started
        return emitted

    def _emit(
        self, session: Session, rows: dict[int, Row], emitted: list[Emitted]
    ) -> Iterator[Event]:
        """Shows the new tokens row by row; rows that have ended leave the batch."""
        eos = self._model.config.eos_token_ids
        for b, row in list(rows.items()):
            for token, origin in zip(emitted[b].tokens, emitted[b].origins, strict=True):
                self.stats.num_decoded_tokens += bool(row.token_ids)
                self.stats.num_generated_tokens += 1
                text = row.push(token, eos)
                yield Token(row.number, token, text, origin)
                if row.finish_reason is not None:
                    session.cascade.retire(b)
                    del rows[b]
                    ids = tuple(row.token_ids)
                    yield End(row.number, row.finish_reason, row.text, ids, self.stats)
                    break


def _read(
    reading: dict[int, Iterator[PrefillProgress]], others: list[bool]
) -> Generator[PrefillProgress, None, list[int]]:
    """Reads prompts: all of them to their ends, or a single chunk while any other row goes on.

    Returns the places of those that have been read.
    """
    done = []
    for b in list(reading):
        for event in reading[b]:
            yield event
            if event.num_done == event.num_tokens:
                del reading[b]
                done.append(b)
                break
            if any(others):
                return done
        if any(others):
            break
    return done
