"""Models whose files are open: configs and tokenizers are read, the weights not yet.

So whatever is wrong with a prompt or a drafter is found before the minutes that large weights take.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch

from minitri.errors import InputError, shorten
from minitri.loading.checkpoint import load_model, not_a_model, open_checkpoint
from minitri.loading.devices import (
    attention_for,
    attention_name,
    check_weights,
    choose_device,
    choose_dtype,
    retrieval_copy,
)
from minitri.loading.fetch import LOOKUPS, default_draft, locate
from minitri.loading.hf_config import read_sampling, stretch_rope
from minitri.loading.tokenizer import check_same_vocabulary
from minitri.loading.tokenizer_files import load_tokenizer
from minitri.model.execution import Ranks
from minitri.model.llama import Llama
from minitri.parallel.ranks import join
from minitri.parallel.split import SplitLlama
from minitri.settings import SamplingParams

log = logging.getLogger("minitri")


class OpenModel:
    """Finds or fetches the files of a model, and reads all but the weights."""

    def __init__(
        self,
        name: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: str = "auto",
        rope_scaling: str | None = None,
        weights: str = "auto",
        progress: bool = False,
        ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
    ) -> None:
        """The arguments are those of `minitri.load`. Raises `InputError`."""
        self._ranks = ranks
        located = ranks.ask_first(lambda: locate(name, progress=progress))
        self._checkpoint = open_checkpoint(located.path)
        config = self._checkpoint.config(located.name)
        if located.context:
            config = dataclasses.replace(config, context_length=located.context)
        self.config = config if rope_scaling is None else stretch_rope(config, rope_scaling)
        has_tokenizer = config.draft_of is None  # else it reads tokens from its target's table
        self.tokenizer = load_tokenizer(self._checkpoint, config) if has_tokenizer else None
        self._dtype, self._device = dtype, device
        self._attend = attention_for(device, dtype, config, attention)
        self._native = weights == "native"
        self._progress = progress

    @property
    def sampling_defaults(self) -> SamplingParams:
        """How its generation_config.json wants texts to be sampled; greedily if there is none."""
        return read_sampling(self._checkpoint.generation_config, self.config.name)

    def load(self, target: Llama | None = None) -> Llama:
        """Reads the weights. `target` lends its embedding table to a drafter that has none."""
        config = self.config
        model = load_model(
            self._checkpoint,
            config,
            dtype=self._dtype,
            device=self._device,
            attend=self._attend,
            target=target,
            native=self._native,
            progress=self._progress,
            ranks=self._ranks if target is None else Ranks(),  # drafters are whole on every rank
        )
        if isinstance(model, SplitLlama):
            model.add_up()
        log.info(
            "%s on %s, %s, attention %s, context %d tokens, RoPE %s",
            config.name,
            self._device,
            str(self._dtype).removeprefix("torch."),
            attention_name(self._attend),
            config.context_length,
            config.rope.describe(),
        )
        return model


class OpenModels:
    """A model and its drafter, all but their weights; the arguments are those of `minitri.load`."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        draft: str | os.PathLike[str],
        *,
        draft_weights: str,
        rope_scaling: str | None,
        weights: str,
        device: str,
        dtype: str,
        attention: str,
        progress: bool,
    ) -> None:
        model = _as_text(model)
        draft = _as_text(draft)
        texts = {"model": model, "draft": draft, "dtype": dtype, "device": device}
        texts |= {"attention": attention, "rope_scaling": rope_scaling or ""}
        texts |= {"weights": weights, "draft_weights": draft_weights}
        for setting, value in texts.items():
            if not isinstance(value, str):
                raise InputError(f"{setting} is {shorten(repr(value), 60)}; it must be a text")
        ranks = join()
        ranks.check_same("models, or ways to load them", texts)
        check_weights(weights, draft_weights)
        place = choose_device(device, ranks)
        options: dict[str, Any] = {"dtype": choose_dtype(dtype, place), "device": place}
        options |= {"attention": attention, "progress": progress, "ranks": ranks}

        self._target = OpenModel(model, rope_scaling=rope_scaling, weights=weights, **options)
        if self._target.tokenizer is None:
            raise not_a_model(self._target.config)
        self.config = self._target.config
        self.tokenizer = self._target.tokenizer
        self.sampling_defaults = self._target.sampling_defaults
        self._draft: OpenModel | None = None
        self._draft_weights = draft_weights
        self._is_draft_optional = draft == "auto"
        name = default_draft(model) if draft == "auto" else draft
        if name not in LOOKUPS:
            with self._or_lookup():
                self._draft = self._open_draft(name, options)

    def load(self) -> tuple[Llama, Llama | None, Llama | None]:
        """Reads the weights: the model; its draft model, its copy in fewer bits, if used."""
        target = self._target.load()
        drafter = None
        retrieval_model = retrieval_copy(target, self._draft_weights)
        if self._draft is not None:
            with self._or_lookup():
                drafter = self._draft.load(target)
        return target, drafter, retrieval_model

    def _open_draft(self, name: str, options: dict[str, Any]) -> OpenModel:
        draft = OpenModel(name, **options)
        if draft.tokenizer is not None:
            check_same_vocabulary(draft.tokenizer, self.tokenizer, draft.config.name)
        return draft

    @contextlib.contextmanager
    def _or_lookup(self) -> Iterator[None]:
        """A drafter that nobody asked for by name may be missing."""
        try:
            yield
        except InputError as error:
            if not self._is_draft_optional:
                raise
            log.warning("%s; suffix lookup takes its place", error)


def _as_text(name: str | os.PathLike[str]) -> str:
    return os.fsdecode(name) if isinstance(name, os.PathLike) else name
