"""The loader: finds or fetches the files of models, checks and reads them, makes an engine."""

from dataclasses import replace
from os import PathLike, fsdecode
from typing import Any

from minitri.core.drafters.plugin import Drafter
from minitri.core.errors import InputError, shorten
from minitri.devices.parallel.ranks import join
from minitri.engine import Engine
from minitri.files.hf_config import read_sampling
from minitri.files.named_models import DEFAULT_MODEL, ModelChoice
from minitri.files.open_models import OpenModel, open_drafter


def load(
    model: str | PathLike[str] = DEFAULT_MODEL,
    *,
    draft: str | PathLike[str] = "auto",
    dtype: str = "auto",
    device: str = "auto",
    attention: str = "auto",
    rope_scaling: str | None = None,
    weights: str = "auto",
    draft_weights: str = "auto",
    drafter: Drafter | None = None,
    progress: bool = False,
) -> Engine:
    """Loads an engine: finds or fetches the files, reads config, tokenizer and weights.

    `model` is a name in `minitri.MODELS`, a folder, a GGUF file, or a hub repository ORG/NAME. So
    is `draft`, a small model that guesses, or it is `suffix` (looks the last words up in the text)
    or `auto` (the drafter of a named model, else `suffix`). `drafter`, an object of yours, guesses
    in its place: see `minitri.Drafter`. `dtype` is float32, bfloat16, float16 or auto (the fastest
    here), `device` cpu, cuda, cuda:N or auto, `attention` a GPU's backend for short blocks: triton,
    flash, math or auto. `rope_scaling`, such as `yarn:4`, extends the context. `weights` of a GGUF
    file are `native` (4 to 8 bits, on a CPU with compiled kernels), `dense` (in `dtype`) or `auto`:
    native if possible. `draft_weights` guess with the retrieval cache: a copy of the target in
    `int4` or, on a GPU, `int8`; the target's own for `same` and `drafter`; `auto` is int4 with
    compiled kernels, unless the target is quantized, and on a GPU with much free memory. Compiled
    kernels run a draft model in 4 bits, except for `same`. `progress` draws bars. All processes of
    torchrun make the same calls. Raises `InputError`."""
    return OpenEngine(
        model=fsdecode(model) if isinstance(model, PathLike) else model,
        draft=fsdecode(draft) if isinstance(draft, PathLike) else draft,
        dtype=dtype,
        device=device,
        attention=attention,
        rope_scaling=rope_scaling,
        weights=weights,
        draft_weights=draft_weights,
        drafter=drafter,
        progress=progress,
    ).load()


class OpenEngine:
    """An engine whose files are open: config and tokenizer are read, the weights not yet.
    So a program can check a prompt before the minutes that large weights take."""

    def __init__(self, *, drafter: Drafter | None = None, progress: bool = False, **fields: Any):
        """Opens the models' files; all arguments are those of `load`. Raises `InputError`."""
        choice = ModelChoice(**fields)
        if drafter is not None:
            if choice.draft != "auto" or not callable(getattr(drafter, "guess", None)):
                given = f"drafter is {shorten(repr(drafter), 60)} with draft {choice.draft!r}"
                raise InputError(f"{given}; give a minitri.Drafter, or a draft, but not both")
            choice = replace(choice, draft="suffix")  # opens no draft model
        join().check_same("models, or ways to load them", choice)
        self._drafter = drafter
        self._target = target = OpenModel(choice, progress=progress)
        self.config = target.config
        if not target.tokenizer:
            problem = f"{self.config.name} is a drafter for {shorten(self.config.draft_of)}"
            raise InputError(f"{problem}, not a model; give it as draft=")
        self.tokenizer = target.tokenizer
        self._draft = open_drafter(target.choice, self.tokenizer, progress)
        self._sampling = read_sampling(target.checkpoint.generation_config, self.config.name)

    def load(self) -> Engine:
        """Reads the weights and makes the engine. Raises `InputError`."""
        target, retrieval_model = self._target.load_target()
        draft = self._draft.load_drafter(target) if self._draft else None
        if join().count > 1:
            fingerprints = [it.execution.identify() for it in (target, draft) if it]
            join().check_same("model files", (self.config, self._sampling, fingerprints))
        return Engine(target, self.tokenizer, draft, retrieval_model, self._drafter, self._sampling)
