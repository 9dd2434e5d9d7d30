"""A run in progress: a batch of prompts becomes a stream of typed events.

A `Generation` works only while it is asked for the next event; stop asking, or call `close`, at any moment. Rows are
prefilled one by one, in chunks, and decode together, one forward pass per step for the whole batch. It knows neither
files nor flags, and nothing here prints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minitri.caches import FullCache
from minitri.config import GenerationConfig, SamplingParams
from minitri.errors import InputError, shorten
from minitri.model import Llama
from minitri.sampling import probs_from_logits, sample
from minitri.stats import PrefillClock, Stats
from minitri.stopping import StopScanner
from minitri.tokenizer import IncrementalDecoder, Tokenizer


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


class Row:
    """One sequence of a batch: what it has said, and whether it is done."""

    def __init__(self, number: int, prompt: list[int], tokenizer: Tokenizer, stop: tuple[str, ...], seed: int) -> None:
        self.number = number
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._decoder = IncrementalDecoder(tokenizer, prompt)
        self._scanner = StopScanner(stop)
        self._random = torch.Generator().manual_seed(seed)

    def uniform(self) -> Tensor:
        """The next number in [0, 1) of this row's own stream, (1,) float64."""
        return torch.rand(1, dtype=torch.float64, generator=self._random)

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
    """A run in progress: iterate for its events, read `stats` at any time, `close` to end it and free its cache."""

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        prompts: list[list[int]],
        sampling: SamplingParams,
        generation: GenerationConfig,
        seeds: list[int],
    ) -> None:
        self._model = model
        self._sampling = sampling
        self._generation = generation
        self.rows = [
            Row(b, prompt, tokenizer, generation.stop, seed)
            for b, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        capacity = max(map(len, prompts)) + generation.max_new_tokens
        cache = self._allocate(len(prompts), capacity)
        self.stats = Stats(num_prompt_tokens=sum(map(len, prompts)), kv_cache_bytes=cache.num_bytes)
        self._events = self._run(cache)  # which alone holds the cache, so that its end frees it

    def __next__(self) -> Event:
        try:
            return next(self._events)
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"{self._model.device} has run out of memory ({shorten(error, 90)}); shorten the prompt, or lower "
                "max_new_tokens or prefill_chunk"
            ) from None

    def close(self) -> None:
        """Ends the run; asking for further events raises `StopIteration`."""
        self._events.close()

    def _allocate(self, batch_size: int, capacity: int) -> FullCache:
        model = self._model
        try:
            return FullCache.allocate(model.config, batch_size, capacity, dtype=model.dtype, device=model.device)
        except RuntimeError:  # out of memory, on CUDA too
            needed = batch_size * capacity * model.config.kv_values_per_token * model.dtype.itemsize
            raise InputError(
                f"the KV cache for {batch_size} x {capacity} tokens needs {needed / 1e9:.1f} GB, which {model.device} "
                "does not have; shorten the prompt, lower max_new_tokens, or use a smaller dtype"
            ) from None

    def _run(self, cache: FullCache) -> Generator[Event, None, None]:
        logits = []
        for row in self.rows:
            logits.append((yield from self._prefill(row, cache)))
        tokens = self._draw(torch.cat(logits))
        while True:
            for row, token in zip(self.rows, tokens, strict=True):
                if row.finish_reason is None:
                    yield from self._emit(row, token)
            if all(row.finish_reason for row in self.rows):
                return
            tokens = self._decode_step(tokens, cache)

    def _prefill(self, row: Row, cache: FullCache) -> Generator[Event, None, Tensor]:
        """Reads a prompt in chunks; returns the logits (1, V) behind it."""
        clock, done, start_seconds = PrefillClock(len(row.prompt)), 0, self.stats.prefill_seconds
        view = cache.row(row.number)
        while done < len(row.prompt):
            chunk = row.prompt[done : done + self._generation.prefill_chunk]
            started = time.perf_counter()
            hidden = self._forward(chunk, done, view)
            done += len(chunk)
            self.stats.prefill_seconds += time.perf_counter() - started
            self.stats.num_prefilled_tokens += len(chunk)
            eta = clock.mark(done, self.stats.prefill_seconds - start_seconds)
            yield PrefillProgress(row.number, done, len(row.prompt), eta)
        with torch.inference_mode():
            cache.advance([done if row is other else 0 for other in self.rows])
            return self._model.logits(hidden[:, -1])

    @torch.inference_mode()
    def _forward(self, chunk: list[int], start: int, view: FullCache) -> Tensor:
        device = self._model.device
        tokens = torch.tensor([chunk], device=device)
        positions = torch.arange(start, start + len(chunk), device=device).unsqueeze(0)
        hidden = self._model(tokens, positions, view)
        view.advance([len(chunk)])
        return hidden

    @torch.inference_mode()
    def _decode_step(self, tokens: list[int], cache: FullCache) -> list[int]:
        """One forward pass for the whole batch. A finished row stays at length 0: no prefix to read."""
        started = time.perf_counter()
        active = [row.finish_reason is None for row in self.rows]
        cache.crop([length if on else 0 for length, on in zip(cache.lengths, active, strict=True)])
        tokens_B1 = torch.tensor(tokens, device=self._model.device).unsqueeze(1)
        hidden = self._model(tokens_B1, cache.device_lengths.unsqueeze(1), cache)
        cache.advance([int(on) for on in active])
        drawn = self._draw(self._model.logits(hidden[:, -1]))
        self.stats.decode_seconds += time.perf_counter() - started
        self.stats.num_decoded_tokens += sum(active)
        return drawn

    @torch.inference_mode()
    def _draw(self, logits_BV: Tensor) -> list[int]:
        if not math.isfinite(float(logits_BV.sum())):
            raise InputError(
                f"{self._model.config.name} computed logits that are not finite in {self._model.dtype}; "
                "the weights are damaged, or need --dtype float32"
            )
        uniforms = torch.cat([row.uniform() for row in self.rows]).to(logits_BV.device)
        return sample(probs_from_logits(logits_BV, self._sampling), uniforms).tolist()

    def _emit(self, row: Row, token: int) -> Iterator[Event]:
        text = row.push(token, self._generation, self._model.config.eos_token_ids)
        self.stats.num_generated_tokens += 1
        yield Token(row.number, token, text)
        if row.finish_reason is not None:
            yield End(row.number, row.finish_reason, row.text, tuple(row.token_ids), self.stats)
