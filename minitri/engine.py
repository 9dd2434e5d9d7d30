"""The engine: boots a model from its name, and turns prompts into a stream of typed events.

    engine = minitri.load("smollm2-135m")
    for event in engine.generate("Once upon a time"):
        if isinstance(event, minitri.Token):
            print(event.text, end="", flush=True)

`generate` checks its input at once and returns a `Generation`, an iterator that works only while it
is asked for the next event. Several prompts of any lengths run as one batch. `complete` runs one
prompt to its end. Nothing here prints.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from minitri.errors import InputError, shorten
from minitri.generation import Completion, End, Generation
from minitri.gpu.pool import SessionPool
from minitri.loading.named_models import DEFAULT_MODEL
from minitri.loading.open_models import OpenModels
from minitri.loading.prompts import Prompt, as_seeds, check_prompt, encode_prompts
from minitri.loading.tokenizer import Tokenizer
from minitri.model.config import ModelConfig
from minitri.model.llama import Llama
from minitri.session import Batch
from minitri.settings import GenerationConfig, SamplingParams, SpeculationConfig


def load(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    draft: str | os.PathLike[str] = "auto",
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
    rope_scaling: str | None = None,
    weights: str = "auto",
    draft_weights: str = "auto",
    progress: bool = False,
    before_weights: Callable[[Tokenizer, ModelConfig], None] | None = None,
) -> "Engine":
    """Boots an engine: finds or fetches the files, reads config, tokenizer and weights.

    `model` is a name from `minitri.MODELS`, a folder or file, or a hub repository ORG/NAME. So is
    `draft`; or it is `ngram`, which looks the last words up in the text, or `auto`, the drafter of
    a named model, and n-grams where there is none. `dtype` is float32, bfloat16, float16 or auto
    (bfloat16 where that is fast). `device` is cpu, cuda, cuda:N or auto. `attention` names a kernel
    for short blocks on a GPU, see `gpu/attention.py`. `rope_scaling` such as `yarn:4` stretches the
    context. `weights` `native` leaves a GGUF file's 4 and 8 bits as they are (on a CPU); `auto`
    does not. `draft_weights` guess with the retrieval cache: the `same`, or `int4`, a copy in 4
    bits, as `auto` does with compiled kernels (on a CPU); the text stays the same. `progress` draws
    bars on standard error. `before_weights` is given tokenizer and config before the weights are
    read, which may take minutes: time to check a prompt. Raises `InputError`.
    """
    options = {"dtype": dtype, "device": device, "attention": attention, "weights": weights}
    options["draft_weights"] = draft_weights
    files = OpenModels(model, draft, rope_scaling=rope_scaling, progress=progress, **options)
    if before_weights is not None:
        before_weights(files.tokenizer, files.config)
    target, drafter, guesser = files.load()
    return Engine(target, files.tokenizer, drafter, guesser)


class Engine:
    """A model and its tokenizer, ready to generate any number of times, one after the other.

    On a GPU it keeps caches and captured graphs of the last run, so that the next one of the same
    settings, with as many texts that are not longer, starts at once; see `release`. Some attention
    kernels cut a cache by its size, so that there, in the last bits, a text may depend on how long
    the texts before it were.
    """

    def __init__(
        self, model: Llama, tokenizer: Tokenizer, draft: Llama | None = None,
        guesser: Llama | None = None,
    ) -> None:  # fmt: skip
        """`draft` is the model behind the first level of the cascade; None: n-gram lookup.

        `guesser`, a copy of the model that may be rough, takes its place at the retrieval level.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.draft = draft
        self.guesser = guesser
        self._pool = SessionPool(model, draft, guesser)

    def __repr__(self) -> str:
        draft = self.draft.config.name if self.draft is not None else "n-grams"
        dtype = str(self.model.dtype).removeprefix("torch.")
        return f"<Engine {self.config.name}, drafter {draft}, {dtype} on {self.model.device}>"

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
        open, at a temperature above 0 and uncoupled, rows share the autotuner's choices; and a
        drafter that fails in one row drafts for none. Raises `InputError` here, before any work, if
        a prompt is empty, too long, or has tokens outside the vocabulary.
        """
        wanted = (SamplingParams, GenerationConfig, SpeculationConfig)
        for given, kind in zip((sampling, generation, speculation), wanted, strict=True):
            if not isinstance(given, kind):
                raise InputError(f"got {shorten(repr(given), 60)} where a {kind.__name__} belongs")
        ids = encode_prompts(prompts, self.tokenizer)
        for tokens in ids:
            check_prompt(tokens, self.config, generation.max_new_tokens)
        batch = Batch(ids, as_seeds(seed, len(ids)), sampling, generation, speculation)
        return Generation(batch, self.tokenizer, self._pool)

    def complete(self, prompt: Prompt, **settings: Any) -> Completion:
        """All that a model says behind one prompt; `settings` are those of `generate`."""
        with self.generate(prompt, **settings) as run:
            if len(run.rows) > 1:
                raise InputError(f"complete takes one prompt, got {len(run.rows)}; use generate")
            end = next(event for event in run if isinstance(event, End))
        return Completion(end.text, end.token_ids, end.finish_reason, end.stats)

    def release(self) -> None:
        """Frees the caches and graphs that are kept on a GPU from one run to the next."""
        self._pool.clear()
