"""The loader: an engine from the names of its models."""

import os
from collections.abc import Callable

from minitri.core.config import ModelConfig
from minitri.core.drafters.plugin import Drafter
from minitri.core.errors import InputError, shorten
from minitri.devices.parallel.ranks import join
from minitri.engine import Engine
from minitri.files.hf_config import read_sampling
from minitri.files.named_models import DEFAULT_MODEL, ModelChoice
from minitri.files.open_models import OpenModel, open_drafter
from minitri.text.tokenizer import Tokenizer


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
    drafter: Drafter | None = None,
    progress: bool = False,
    before_weights: Callable[[Tokenizer, ModelConfig], None] | None = None,
) -> Engine:
    """Boots an engine: finds or fetches the files, reads config, tokenizer and weights.

    `model` is a name from `minitri.MODELS`, a folder or file, or a hub repository ORG/NAME. So is
    `draft`; or it is `suffix`, which looks the last words up in the text, or `auto`, the drafter of
    a named model, and `suffix` where there is none. A `drafter` is an object of yours that guesses
    in its place, see `minitri.Drafter`.
    `dtype` is float32, bfloat16, float16 or auto (bfloat16 where that is fast). `device` is cpu,
    cuda, cuda:N or auto. `attention` names a backend (`devices/gpu/attention_backends.py`) for
    short blocks on a GPU. `rope_scaling` such as `yarn:4` stretches the context. `weights` `native`
    leaves a GGUF file's 4 to 8 bits as they are (on a CPU); so does `auto` where memory is short.
    `draft_weights` guess with the retrieval cache: the `same`, or a copy, of which the text does
    not depend: `int4`, as `auto` with compiled kernels, which hold the drafter in 4 bits, too
    (`drafter`: it alone), or on a GPU `int8`. `progress` draws bars on standard error.
    `before_weights` is given tokenizer and config before the weights are read: time to check a
    prompt. Under torchrun each process holds a share of the model, and all must make the same
    calls. Raises `InputError`.
    """
    if drafter is not None and (draft != "auto" or not callable(getattr(drafter, "guess", None))):
        given = f"drafter is {shorten(repr(drafter), 60)} with draft {shorten(repr(draft), 60)}"
        raise InputError(f"{given}; give a minitri.Drafter, or a draft, but not both")
    model, draft = (
        os.fsdecode(name) if isinstance(name, os.PathLike) else name for name in (model, draft)
    )
    lookup = draft if drafter is None else "suffix"
    choice = ModelChoice(
        model, dtype, attention, weights, draft_weights, device, rope_scaling, lookup
    )
    join().check_same("models, or ways to load them", choice)
    target = OpenModel(choice, progress=progress)
    tokenizer = target.tokenizer
    config = target.config
    if tokenizer is None:
        owner = shorten(config.draft_of)
        raise InputError(
            f"{config.name} is a drafter for {owner}, not a model; give it as draft=, and {owner} "
            "as model="
        )
    opened_draft = open_drafter(choice, tokenizer, progress)
    defaults = read_sampling(target.checkpoint.generation_config, config.name)
    if before_weights is not None:
        before_weights(tokenizer, config)
    loaded, retrieval_model = target.load_target()
    draft_model = opened_draft.load_drafter(loaded) if opened_draft is not None else None
    fingerprints = [it.execution.fingerprint for it in (loaded, draft_model) if it is not None]
    join().check_same("model files", (config, defaults, fingerprints))
    return Engine(loaded, tokenizer, draft_model, retrieval_model, drafter, defaults)
