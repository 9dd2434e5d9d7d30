"""A run in progress: a batch of prompts becomes a stream of typed events.

A `Generation` works only while it is asked for the next event; stop asking, or call `close`, at any moment. Rows are
prefilled one by one, in chunks, and decode together, step by step of a cascade (`cascade.py`), whose tokens are cut
here at the end of a text. It knows neither files nor flags, and nothing here prints.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch

from minitri.assembly import build_cascade
from minitri.decoding.cascade import Cascade, Emitted
from minitri.errors import InputError, shorten
from minitri.gpu.graphs import graph_pool
from minitri.model.llama import Llama
from minitri.runner import prefill, synchronize
from minitri.readers import Readers, Shelf, allocate_full_cache
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.decoding.stats import PrefillClock, Stats
from minitri.decoding.stopping import StopScanner
from minitri.loading.tokenizer import IncrementalDecoder, Tokenizer
from minitri.decoding.verification import NotFiniteError


@dataclass(frozen=True)
class PrefillProgress:
    """A chunk of a prompt has been read."""

    row: int
    num_done: int
    """Tokens of this prompt read so far."""
    num_tokens: int
    """Tokens of this prompt."""
    eta_seconds: float
    """Seconds that the rest of this prompt will probably take."""


@dataclass(frozen=True)
class Token:
    """A new token of one row."""

    row: int
    token_id: int
    text: str
    """Text that became certain with this token. Empty while a character or a possible stop string is incomplete."""
    origin: str
    """Where it came from: the stage that guessed it, `draft` or `retrieval`, or `recovered` or `bonus`, the target."""


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
    stats: Stats
    """The statistics of the whole batch, live."""


Event = PrefillProgress | Token | End


@contextlib.contextmanager
def at_work(model: Llama) -> Iterator[None]:
    """Makes a model's device the current one, whose streams it means, and turns what may go wrong while it runs into an
    `InputError`."""
    on_device = (
        torch.cuda.device(model.device) if model.device.type == "cuda" else contextlib.nullcontext()
    )
    try:
        with on_device:
            yield
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"{model.device} has run out of memory ({shorten(error, 90)}); shorten the prompt, or lower "
            "max_new_tokens or prefill_chunk"
        ) from None
    except NotFiniteError:
        raise InputError(
            f"{model.config.name} or its drafter computed logits that are not finite in {model.dtype}; "
            "the weights are damaged, or need --dtype float32"
        ) from None


class Row:
    """One sequence of a batch: what it has said, and whether it is done."""

    def __init__(
        self, number: int, prompt: list[int], tokenizer: Tokenizer, stop: tuple[str, ...]
    ) -> None:
        self.number = number
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._scanner = StopScanner(stop)

    def push(self, token: int, generation: GenerationConfig, eos: tuple[int, ...]) -> str:
        """Takes in a token; returns the text that may be shown now, and sets `finish_reason` if the row is done."""
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
    """A run in progress: iterate for its events, read `stats` at any time, `close` to end it and give up its cache."""

    def __init__(
        self,
        model: Llama,
        draft: Llama | None,
        tokenizer: Tokenizer,
        prompts: list[list[int]],
        seeds: list[int],
        sampling: SamplingParams,
        generation: GenerationConfig,
        speculation: SpeculationConfig,
        shelf: Shelf,
    ) -> None:
        """What is on the `shelf` is used if it suits, and what is used is put there in the end."""
        self._model = model
        self._generation = generation
        with torch.inference_mode(), at_work(model):
            self.rows = [
                Row(b, prompt, tokenizer, generation.stop) for b, prompt in enumerate(prompts)
            ]
            self.stats = Stats(num_prompt_tokens=sum(map(len, prompts)))
            lengths = list(map(len, prompts))
            capacity = max(lengths) + generation.max_new_tokens + speculation.max_block - 1
            readers = shelf.take(model, draft, lengths, capacity, generation, sampling, speculation)
            try:
                if readers is None:
                    full = allocate_full_cache(
                        model, draft, lengths, capacity, generation, speculation
                    )
                    graphs = graph_pool(model.device, wanted=generation.cuda_graphs)
                    readers = Readers(model, draft, full, lengths, sampling, speculation, graphs)
            except RuntimeError as error:  # out of memory, on CUDA too
                raise InputError(
                    f"the small KV caches do not fit on {model.device} beside the full one ({shorten(error, 90)}); "
                    "lower budget or num_recent_tokens, or shorten the prompt"
                ) from None
            cascade = build_cascade(
                readers, [list(prompt) for prompt in prompts], seeds, self.stats
            )
            # This alone holds the caches, so that its end gives them up.
            self._events = self._run(cascade, readers, shelf, shelf.ticket)

    def __next__(self) -> Event:
        with torch.inference_mode(), at_work(self._model):
            return next(self._events)

    def close(self) -> None:
        """Ends the run; asking for further events raises `StopIteration`."""
        self._events.close()

    def _run(
        self, cascade: Cascade, readers: Readers, shelf: Shelf, ticket: int
    ) -> Generator[Event, None, None]:
        try:
            yield from self._work(cascade, readers)
        except GeneratorExit:
            shelf.put(readers, self._generation, ticket)
            raise
        shelf.put(readers, self._generation, ticket)

    def _work(self, cascade: Cascade, readers: Readers) -> Generator[Event, None, None]:
        for row in self.rows:
            yield from self._prefill(row, readers)
        started = time.perf_counter()
        emitted = cascade.start()
        self.stats.prefill_seconds += time.perf_counter() - started
        self.stats.rebuild_seconds = self.stats.commit_seconds = (
            0.0  # so far they were part of the prefill
        )
        yield from self._emit(cascade, emitted)
        while any(cascade.active):
            started = time.perf_counter()
            emitted = cascade.step()
            self.stats.decode_seconds += time.perf_counter() - started
            yield from self._emit(cascade, emitted)

    def _prefill(self, row: Row, readers: Readers) -> Generator[Event, None, None]:
        """Reads a prompt in chunks. Its last token is left to the cascade's start, and reported with the last chunk."""
        small = readers.small
        b, num_tokens, start_seconds = row.number, len(row.prompt), self.stats.prefill_seconds
        clock = PrefillClock(num_tokens)
        chunks = prefill(
            self._model, row.prompt, readers.full, b, chunk=self._generation.prefill_chunk,
            watch=functools.partial(small.observe, b) if small else None,
            max_queries=small.max_prompt_queries if small else None,
        )  # fmt: skip
        done = 0
        while done < num_tokens:
            started = time.perf_counter()
            end = next(chunks, num_tokens - 1)
            synchronize(self._model.device)
            read, done = done, num_tokens if end == num_tokens - 1 else end
            self.stats.num_prefilled_tokens += done - read
            self.stats.prefill_seconds += time.perf_counter() - started
            eta = clock.mark(done, self.stats.prefill_seconds - start_seconds)
            yield PrefillProgress(b, done, num_tokens, eta)

    def _emit(self, cascade: Cascade, emitted: list[Emitted]) -> Iterator[Event]:
        """Shows the new tokens row by row, and takes the rows out that have ended."""
        for row, new in zip(self.rows, emitted, strict=True):
            for token, origin in zip(new.tokens, new.origins, strict=True):
                self.stats.num_decoded_tokens += bool(row.token_ids)
                self.stats.num_generated_tokens += 1
                text = row.push(token, self._generation, self._model.config.eos_token_ids)
                yield Token(row.number, token, text, origin)
                if row.finish_reason is not None:
                    cascade.retire(row.number)
                    yield End(
                        row.number, row.finish_reason, row.text, tuple(row.token_ids), self.stats
                    )
                    break
