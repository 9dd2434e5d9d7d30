"""A run in progress: a batch of prompts becomes a stream of typed events.

A `Generation` works only while it is asked for the next event; stop asking, or call `close`, at any
moment. Prompts are read one by one, in chunks, and rows are decoded together, step by step of a
cascade (`decoding/cascade.py`), whose tokens are cut here at the end of a text. It knows neither
files nor flags, and nothing here prints.
"""

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from minitri.decoding.cascade import Emitted
from minitri.decoding.stats import Stats
from minitri.decoding.stopping import StopScanner
from minitri.decoding.verification import NotFiniteError
from minitri.errors import InputError, shorten
from minitri.gpu.pool import SessionPool
from minitri.gpu.streams import synchronize
from minitri.loading.tokenizer import IncrementalDecoder, Tokenizer
from minitri.model.llama import Llama
from minitri.session import Batch, Session
from minitri.settings import GenerationConfig


@dataclass(frozen=True)
class PrefillProgress:
    """A chunk of a prompt has been read."""

    row: int
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
    """Where it came from: the stage that guessed it, `draft` or `retrieval`, or the target itself,
    `recovered` or `bonus`."""


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
    """The output of one sequence of a batch: its tokens, its text, and whether it is done."""

    def __init__(
        self, number: int, prompt: list[int], tokenizer: Tokenizer, stop: Sequence[str]
    ) -> None:
        self.number = number
        self.num_prompt_tokens = len(prompt)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._scanner = StopScanner(stop)

    def push(self, token: int, generation: GenerationConfig, eos: tuple[int, ...]) -> str:
        """Takes in a token; returns the text that may be shown now. Sets `finish_reason`."""
        self.token_ids.append(token)
        if token in eos and not generation.ignore_eos:
            self.finish_reason = "eos"
            fresh = self._scanner.push(self._decoder.flush())
        else:
            fresh = self._scanner.push(self._decoder.push(token))
            if not self._scanner.found and len(self.token_ids) == generation.max_new_tokens:
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

    def __init__(self, batch: Batch, tokenizer: Tokenizer, pool: SessionPool) -> None:
        """Takes models and memory for the run from the `pool`; returns the memory at the end."""
        self._model, self._settings = pool.target, batch.generation
        stop = self._settings.stop
        self.rows = [Row(b, prompt, tokenizer, stop) for b, prompt in enumerate(batch.prompts)]
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
        stats, cascade = self.stats, session.cascade
        try:
            for row in self.rows:
                yield from self._prefill(row, session)
            started = time.perf_counter()
            emitted = cascade.start()
            stats.prefill_seconds += time.perf_counter() - started
            stats.commit_seconds = stats.rebuilds.seconds = 0.0  # were part of the prefill
            yield from self._emit(session, emitted)
            while any(cascade.active):
                started = time.perf_counter()
                emitted = session.step()
                stats.decode_seconds += time.perf_counter() - started
                yield from self._emit(session, emitted)
        except GeneratorExit:  # closed; after any other error the session is not kept
            pool.put(session)
            raise
        pool.put(session)

    def _prefill(self, row: Row, session: Session) -> Iterator[Event]:
        """Reads a prompt in chunks. `Cascade.start` reads its last token, reported here as read."""
        stats, num_tokens = self.stats, row.num_prompt_tokens
        chunks, done = session.prefill(row.number), 0
        while done < num_tokens:
            started = time.perf_counter()
            end = next(chunks, num_tokens - 1)
            synchronize(self._model.device)
            read, done = done, num_tokens if end == num_tokens - 1 else end
            stats.num_prefilled_tokens += done - read
            stats.prefill_seconds += time.perf_counter() - started
            yield PrefillProgress(row.number, done, num_tokens)

    def _emit(self, session: Session, emitted: list[Emitted]) -> Iterator[Event]:
        """Shows the new tokens row by row, and retires the rows that have ended."""
        eos = self._model.config.eos_token_ids
        for row, new in zip(self.rows, emitted, strict=True):
            for token, origin in zip(new.tokens, new.origins, strict=True):
                self.stats.num_decoded_tokens += bool(row.token_ids)
                self.stats.num_generated_tokens += 1
                text = row.push(token, self._settings, eos)
                yield Token(row.number, token, text, origin)
                if row.finish_reason is not None:
                    session.cascade.retire(row.number)
                    ids = tuple(row.token_ids)
                    yield End(row.number, row.finish_reason, row.text, ids, self.stats)
                    break
