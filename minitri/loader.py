"""The loader: an engine from the names of its models."""

import os
from collections.abc import Callable
from typing import Any

from minitri.config import ModelConfig
from minitri.drafters.plugin import Drafter
from minitri.engine import Engine
from minitri.errors import InputError, shorten
from minitri.loading.devices import ModelChoice
from minitri.loading.named_models import DEFAULT_MODEL
from minitri.loading.open_models import OpenModels
from minitri.loading.tokenizer import Tokenizer


def load(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    draft: str | os.PathLike[str] = "auto",
    drafter: Drafter | None = None,
    progress: bool = False,
    before_weights: Callable[[Tokenizer, ModelConfig], None] | None = None,
    **choice: Any,
) -> Engine:
    """Boots an engine. Raises `InputError`.

    `model` is a name from `minitri.MODELS`, a folder or file, or a hub repository ORG/NAME. So is
    `draft`; or it is `suffix`, which looks the last words up in the text, or `auto`, the drafter of
    a named model, and `suffix` where there is none. A `drafter` is an object of yours that guesses
    in its place, see `minitri.Drafter`. `progress` draws bars on standard error. `before_weights`
    is given tokenizer and config before the weights are read: time to check a prompt.

    `choice` may be `dtype`, `device`, `attention`, `rope_scaling`, `weights` and `draft_weights`,
    as texts: the other fields of `ModelChoice` in `loading/devices.py`, which describes them. Under
    torchrun each process holds a share of the model, and all must make the same calls.
    """
    if drafter is not None and (draft != "auto" or not callable(getattr(drafter, "guess", None))):
        given = f"drafter is {shorten(repr(drafter), 60)} with draft {shorten(repr(draft), 60)}"
        raise InputError(f"{given}; give a minitri.Drafter, or a draft, but not both")
    model, draft = (
        os.fsdecode(name) if isinstance(name, os.PathLike) else name for name in (model, draft)
    )
    lookup = draft if drafter is None else "suffix"
    files = OpenModels(ModelChoice(model, draft=lookup, **choice), progress=progress)
    if before_weights is not None:
        before_weights(files.tokenizer, files.config)
    target, draft_model, retrieval_model = files.load()
    defaults = files.sampling_defaults
    return Engine(target, files.tokenizer, draft_model, retrieval_model, drafter, defaults)
