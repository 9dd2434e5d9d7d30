"""The engine: boots a model from its name, and turns prompts into a stream of typed events.

    engine = minitri.load("smollm2-135m")
    for event in engine.generate("Once upon a time"):
        if isinstance(event, minitri.Token):
            print(event.text, end="", flush=True)

`generate` checks its input at once and returns a `Generation`, an iterator that works only while it
is asked for the next event. Several prompts of any lengths run as one batch. Nothing here prints.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from minitri.devices import attention_for, attention_name, choose_device, choose_dtype
from minitri.errors import InputError, shorten
from minitri.generation import Generation
from minitri.gpu.pool import SessionPool
from minitri.loading.checkpoint import load_model, open_checkpoint
from minitri.loading.fetch import default_draft, locate
from minitri.loading.named_models import DEFAULT_MODEL
from minitri.loading.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer
from minitri.model.config import ModelConfig
from minitri.model.llama import Llama
from minitri.session import Batch
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig

log = logging.getLogger("minitri")

Prompt = str | Sequence[int]
MAX_SEED = 2**32 - 1
"""PyTorch's generator on the CPU looks at no more bits."""


def load(
    model: str = DEFAULT_MODEL,
    *,
    draft: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
    rope_scaling: str | None = None,
    progress: bool = False,
) -> Engine:
    """Boots an engine: finds or fetches the files, reads config, tokenizer and weights.

    `model` is a name from `minitri.MODELS`, a folder or file, or a hub repository ORG/NAME. So is
    `draft`; or it is `ngram`, which looks the last words up in the text, or `auto`, the drafter
    that belongs to a named model, and n-grams where there is none. `dtype` is float32, bfloat16,
    float16 or auto (bfloat16 where the device is fast at it). `device` is cpu, cuda, cuda:N or
    auto. `attention` names a kernel for short blocks on a GPU, see `gpu/attention.py`.
    `rope_scaling` such as `yarn:4` stretches the context. `progress` draws bars on standard error.
    Raises `InputError`.
    """
    place = choose_device(device)
    options: dict[str, Any] = {"dtype": choose_dtype(dtype, place), "device": place}
    options |= {"attention": attention, "progress": progress}
    target, tokenizer = _load_one(model, rope_scaling=rope_scaling, **options)
    assert tokenizer is not None  # a model that is no drafter has one
    name = default_draft(model) if draft == "auto" else draft
    if name == "ngram":
        return Engine(target, tokenizer)
    try:
        drafter, its_tokenizer = _load_one(name, target=target, **options)
    except InputError as error:
        if draft != "auto":
            raise
        log.warning("%s; n-grams take its place", error)
        return Engine(target, tokenizer)
    if its_tokenizer is not None:  # else it reads tokens from the target's own table
        check_same_vocabulary(its_tokenizer, tokenizer, drafter.config.name)
    return Engine(target, tokenizer, drafter)


def _load_one(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    progress: bool,
    rope_scaling: str | None = None,
    target: Llama | None = None,
) -> tuple[Llama, Tokenizer | None]:
    located = locate(name, progress=progress)
    checkpoint = open_checkpoint(located.path)
    config = checkpoint.config(located.name)
    if located.context:
        config = config.with_context(located.context)
    if rope_scaling is not None:
        config = config.with_rope_scaling(rope_scaling)
    tokenizer = load_tokenizer(checkpoint, config) if config.draft_of is None else None
    attend = attention_for(device, dtype, config, attention)
    model = load_model(
        checkpoint, config, dtype=dtype, device=device, attend=attend, target=target,
        progress=progress,
    )  # fmt: skip
    log.info(
        "%s on %s, %s, attention %s, context %d tokens, RoPE %s",
        config.name, device, str(dtype).removeprefix("torch."), attention_name(attend),
        config.context_length, config.rope.describe(),
    )  # fmt: skip
    return model, tokenizer


class Engine:
    """A model and its tokenizer, ready to generate any number of times, one after the other.

    On a GPU it keeps caches and captured graphs of the last run, so that the next one of the same
    settings, with as many texts that are not longer, starts at once; see `release`. Some attention
    kernels cut a cache by its size, so that there, in the last bits, a text may depend on how long
    the texts before it were.
    """

    def __init__(self, model: Llama, tokenizer: Tokenizer, draft: Llama | None = None) -> None:
        """`draft` is the model behind the first level of the cascade; None: n-gram lookup."""
        self.model = model
        self.tokenizer = tokenizer
        self.draft = draft
        self._pool = SessionPool()

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        generation: GenerationConfig = GenerationConfig(),  # noqa: B008 (frozen)
        speculation: SpeculationConfig = SpeculationConfig(),  # noqa: B008 (frozen)
        seed: int | Sequence[int] = 0,
    ) -> Generation:
        """Starts a run over one prompt or several; each is a text or a list of token ids.

        A single `seed` gives row b the seed `seed + b`. A row's tokens depend on its own prompt and
        seed alone, up to the last bits of the arithmetic. One exception: where method or gammas are
        open, at a temperature above 0 and uncoupled, rows share the autotuner's choices. Raises
        `InputError` here, before any work, if a prompt is empty, too long, or has tokens outside
        the vocabulary.
        """
        ids = [self._encode(prompt) for prompt in as_batch(prompts)]
        if not ids:
            raise InputError("there is no prompt; give at least one text or one list of token ids")
        for tokens in ids:
            self.check_prompt(tokens, generation.max_new_tokens)
        batch = Batch(ids, as_seeds(seed, len(ids)), sampling, generation, speculation)
        return Generation(self.model, self.draft, self.tokenizer, batch, self._pool)

    def release(self) -> None:
        """Frees the caches and graphs that are kept on a GPU from one run to the next."""
        self._pool.clear()

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt) if prompt else []
        try:
            if isinstance(prompt, bytes):
                raise TypeError
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise InputError(
                f"a prompt is {type(prompt).__name__} {shorten(repr(prompt), 60)}; give a text or "
                "a list of token ids"
            ) from None

    def check_prompt(self, ids: list[int], num_new: int) -> None:
        """Raises `InputError` unless a prompt is valid and leaves room for `num_new` tokens."""
        config = self.config
        if not ids:
            raise InputError("the prompt is empty; give at least one character or token")
        for token in ids:
            if not 0 <= token < config.vocab_size:
                raise InputError(
                    f"prompt has token id {token}; {config.name} has ids from 0 to "
                    f"{config.vocab_size - 1}"
                )
        if len(ids) + num_new > config.context_length:
            raise InputError(
                f"prompt has {len(ids)} tokens but {config.name} holds {config.context_length} "
                f"minus max_new_tokens={num_new}; shorten the prompt (--max-prompt-tokens), lower "
                "--max-new-tokens, or stretch the context (--rope-scaling yarn:4)"
            )


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list; a tensor or array of one dimension is one prompt."""
    if isinstance(prompts, str | bytes):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and not isinstance(items[0], str | Sequence) and not getattr(items[0], "shape", ()):
        return [items]
    return items


def as_seeds(seed: int | Sequence[int], num_rows: int) -> list[int]:
    """One seed per row. Raises `InputError` unless a generator can take them."""
    try:
        seeds = [operator.index(s) for s in seed] if isinstance(seed, Iterable) else []
        seeds = seeds or [operator.index(seed) + b for b in range(num_rows)]  # type: ignore[arg-type]
    except TypeError:
        seeds = []
    if len(seeds) != num_rows or not all(0 <= s <= MAX_SEED for s in seeds):
        raise InputError(
            f"seed is {shorten(seed, 60)}; give a whole number from 0 to 2^32 - {num_rows}, or one "
            f"for each of {num_rows} prompts"
        )
    return seeds
