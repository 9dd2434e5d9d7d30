"""The engine: boots a model from its name, and turns prompts into a stream of typed events.

    engine = minitri.load("smollm2-135m")
    for event in engine.generate("Once upon a time"):
        if isinstance(event, minitri.Token):
            print(event.text, end="", flush=True)

`generate` checks its input at once and returns a `Generation`, an iterator that works only while it is asked for the
next event; stop asking, or call `close`, at any moment. Several prompts of any lengths run as one ragged batch: rows
are prefilled one by one, in chunks, and decode together. Nothing here prints.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minitri.caches import FullCache
from minitri.checkpoint import load_model, open_checkpoint
from minitri.config import DEFAULT_MODEL, GenerationConfig, ModelConfig, SamplingParams
from minitri.errors import InputError
from minitri.fetch import locate
from minitri.linear import can_pack
from minitri.model import Llama
from minitri.sampling import probs_from_logits, sample
from minitri.stats import PrefillClock, Stats
from minitri.stopping import StopScanner
from minitri.tokenizer import IncrementalDecoder, Tokenizer, load_tokenizer

log = logging.getLogger("minitri")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
Prompt = str | Sequence[int]


def load(
    model: str = DEFAULT_MODEL,
    *,
    dtype: str = "auto",
    device: str = "auto",
    rope_scaling: str | None = None,
    progress: bool = False,
) -> Engine:
    """Boots an engine: finds or fetches the files, reads config, tokenizer and weights.

    `model` is a name from `minitri.MODELS`, a folder or file, or a hub repository ORG/NAME. `dtype` is float32,
    bfloat16, float16 or auto (bfloat16 where the device is fast at it). `device` is cpu, cuda, cuda:N or auto.
    `rope_scaling` such as `yarn:4` stretches the context. `progress` draws bars on standard error. Raises `InputError`.
    """
    target = choose_device(device)
    number_type = choose_dtype(dtype, target)
    located = locate(model, progress=progress)
    checkpoint = open_checkpoint(located.path)
    config = checkpoint.config(located.name)
    if located.context:
        config = config.with_context(located.context)
    if rope_scaling is not None:
        config = config.with_rope_scaling(rope_scaling)
    tokenizer = load_tokenizer(checkpoint, config)
    network = load_model(checkpoint, config, dtype=number_type, device=target, progress=progress)
    log.info(
        "%s on %s, %s, context %d tokens, RoPE %s",
        config.name, target, str(number_type).removeprefix("torch."), config.context_length, config.rope.describe(),
    )  # fmt: skip
    return Engine(network, tokenizer)


def choose_device(name: str) -> torch.device:
    """A device that is there, or an `InputError`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} is unknown; use cpu, cuda, cuda:N or auto") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported; use cpu, cuda, cuda:N or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device {name!r} is not there: this PyTorch sees {torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a name; `auto` is bfloat16 where the device computes in it, float32 elsewhere."""
    if name == "auto":
        fast = device.type == "cuda" or can_pack(torch.bfloat16, device)
        return torch.bfloat16 if fast else torch.float32
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is unknown; use {', '.join(DTYPES)} or auto")
    return DTYPES[name]


class Engine:
    """A model and its tokenizer, ready to generate. One engine serves any number of runs, one after the other."""

    def __init__(self, model: Llama, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (frozen)
        seed: int | Sequence[int] = 0,
    ) -> Generation:
        """Starts a run over one prompt or several; each is a text or a list of token ids.

        A single `seed` gives row b the seed `seed + b`. A row's tokens depend on its own prompt and seed alone, up to
        the last bits of the arithmetic. Raises `InputError` here, before any work, if a prompt is empty, too long, or
        has tokens outside the vocabulary.
        """
        rows = [list(prompt) if not isinstance(prompt, str) else prompt for prompt in as_batch(prompts)]
        ids = [self.tokenizer.encode(row) if isinstance(row, str) else row for row in rows]
        if not rows:
            raise InputError("there is no prompt; give at least one text or one list of token ids")
        for row, tokens in zip(rows, ids, strict=True):
            self._check_prompt(row, tokens, generation)
        seeds = [seed + b for b in range(len(ids))] if isinstance(seed, int) else list(seed)
        if len(seeds) != len(ids) or not all(0 <= s < 2**63 for s in seeds):
            raise InputError(f"seed is {seed}; give one number from 0 to 2^63 - 1, or one for each of {len(ids)} prompts")
        return Generation(self, ids, sampling, generation, seeds)

    def _check_prompt(self, prompt: str | list[int], ids: list[int], generation: GenerationConfig) -> None:
        config, num_new = self.config, generation.max_new_tokens
        if not prompt or not ids:
            raise InputError("the prompt is empty; give at least one character or token")
        for token in ids:
            if not 0 <= token < config.vocab_size:
                raise InputError(f"prompt has token id {token}; {config.name} has ids from 0 to {config.vocab_size - 1}")
        if len(ids) + num_new > config.context_length:
            raise InputError(
                f"prompt has {len(ids)} tokens but {config.name} holds {config.context_length} minus "
                f"max_new_tokens={num_new}; shorten the prompt (--max-prompt-tokens), lower --max-new-tokens, or stretch "
                "the context (--rope-scaling yarn:4)"
            )


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


class _Row:
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
        engine: Engine,
        prompts: list[list[int]],
        sampling: SamplingParams,
        generation: GenerationConfig,
        seeds: list[int],
    ) -> None:
        self._model = engine.model
        self._sampling = sampling
        self._generation = generation
        self.rows = [
            _Row(b, prompt, engine.tokenizer, generation.stop, seed)
            for b, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        capacity = max(map(len, prompts)) + generation.max_new_tokens
        self._cache = self._allocate(len(prompts), capacity)
        self.stats = Stats(num_prompt_tokens=sum(map(len, prompts)), kv_cache_bytes=self._cache.num_bytes)
        self._events = self._run()

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """Ends the run; asking for further events raises `StopIteration`."""
        self._events.close()
        del self._cache

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

    def _run(self) -> Iterator[Event]:
        logits = []
        for row in self.rows:
            logits.append((yield from self._prefill(row)))
        tokens = self._draw(torch.cat(logits))
        while True:
            for row, token in zip(self.rows, tokens, strict=True):
                if row.finish_reason is None:
                    yield from self._emit(row, token)
            if all(row.finish_reason for row in self.rows):
                return
            tokens = self._decode_step(tokens)

    def _prefill(self, row: _Row) -> Iterator[Event]:  # returns the logits (1, V) behind the prompt
        clock, done, start_seconds = PrefillClock(len(row.prompt)), 0, self.stats.prefill_seconds
        view = self._cache.row(row.number)
        while done < len(row.prompt):
            chunk = row.prompt[done : done + self._generation.prefill_chunk]
            started = time.perf_counter()
            hidden = self._forward(chunk, done, view)
            done += len(chunk)
            self.stats.prefill_seconds += time.perf_counter() - started
            self.stats.num_prefilled_tokens += len(chunk)
            eta = clock.mark(done, self.stats.prefill_seconds - start_seconds)
            yield PrefillProgress(row.number, done, len(row.prompt), eta)
        self._cache.advance([done if row is other else 0 for other in self.rows])
        with torch.inference_mode():
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
    def _decode_step(self, tokens: list[int]) -> list[int]:
        """One forward pass for the whole batch. A finished row stays at length 0, where it costs next to nothing."""
        started = time.perf_counter()
        active = [row.finish_reason is None for row in self.rows]
        self._cache.crop([length if on else 0 for length, on in zip(self._cache.lengths, active, strict=True)])
        tokens_B1 = torch.tensor(tokens, device=self._model.device).unsqueeze(1)
        hidden = self._model(tokens_B1, self._cache.device_lengths.unsqueeze(1), self._cache)
        self._cache.advance([int(on) for on in active])
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

    def _emit(self, row: _Row, token: int) -> Iterator[Event]:
        text = row.push(token, self._generation, self._model.config.eos_token_ids)
        self.stats.num_generated_tokens += 1
        yield Token(row.number, token, text)
        if row.finish_reason is not None:
            yield End(row.number, row.finish_reason, row.text, tuple(row.token_ids), self.stats)
