"""The engine: boots a model from its name, and turns prompts into a stream of typed events.

    engine = minitri.load("smollm2-135m")
    for event in engine.generate("Once upon a time"):
        if isinstance(event, minitri.Token):
            print(event.text, end="", flush=True)

`generate` checks its input at once and returns a `Generation`, an iterator that works only while it
is asked for the next event. Several prompts of any lengths run as one batch. Nothing here prints.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch

from minitri.errors import InputError
from minitri.generation import Generation
from minitri.gpu.pool import SessionPool
from minitri.loading.checkpoint import load_model, open_checkpoint
from minitri.loading.devices import attention_for, attention_name, choose_device, choose_dtype
from minitri.loading.fetch import default_draft, locate
from minitri.loading.hf_config import stretch_rope
from minitri.loading.named_models import DEFAULT_MODEL
from minitri.loading.prompts import Prompt, as_seeds, check_prompt, encode_prompts
from minitri.loading.tokenizer import Tokenizer, check_same_vocabulary, load_tokenizer
from minitri.model.config import ModelConfig
from minitri.model.llama import Llama
from minitri.session import Batch
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig

log = logging.getLogger("minitri")


def load(
    model: str = DEFAULT_MODEL,
    *,
    draft: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
    rope_scaling: str | None = None,
    progress: bool = False,
) -> "Engine":
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
        config = dataclasses.replace(config, context_length=located.context)
    if rope_scaling is not None:
        config = stretch_rope(config, rope_scaling)
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
        self._pool = SessionPool(model, draft)

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
        ids = encode_prompts(prompts, self.tokenizer)
        for tokens in ids:
            check_prompt(tokens, self.config, generation.max_new_tokens)
        batch = Batch(ids, as_seeds(seed, len(ids)), sampling, generation, speculation)
        return Generation(batch, self.tokenizer, self._pool)

    def release(self) -> None:
        """Frees the caches and graphs that are kept on a GPU from one run to the next."""
        self._pool.clear()
