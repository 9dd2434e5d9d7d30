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

from minitri.errors import InputError
from minitri.loading.checkpoint import load_model, open_checkpoint
from minitri.loading.devices import (
    attention_for,
    attention_name,
    check_names,
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
    ) -> None:
        """The arguments are those of `minitri.load`. Raises `InputError`."""
        located = join().ask_first(lambda: locate(name, progress=progress))
        self.checkpoint = open_checkpoint(located.path)
        config = self.checkpoint.config(located.name)
        if located.context:
            config = dataclasses.replace(config, context_length=located.context)
        self.config = config if rope_scaling is None else stretch_rope(config, rope_scaling)
        has_tokenizer = config.draft_of is None  # else it reads tokens from its target's table
        self.tokenizer = load_tokenizer(self.checkpoint, config) if has_tokenizer else None
        attend = attention_for(device, dtype, config, attention)
        self._options: dict[str, Any] = {"dtype": dtype, "device": device, "attend": attend}
        self._options |= {"native": weights == "native", "progress": progress}

    def load(self, target: Llama | None = None) -> Llama:
        """Reads the weights. `target` lends its embedding table to a drafter that has none."""
        ranks = join() if target is None else Ranks()  # a drafter is whole on every rank
        options = {**self._options, "target": target, "ranks": ranks}
        model = load_model(self.checkpoint, self.config, **options)
        if isinstance(model, SplitLlama):
            model.add_up()
        log.info(
            "%s on %s, %s, attention %s, context %d tokens, RoPE %s",
            self.config.name,
            model.device,
            str(model.dtype).removeprefix("torch."),
            attention_name(model.attend),
            self.config.context_length,
            self.config.rope.describe(),
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
        model, draft = (
            os.fsdecode(it) if isinstance(it, os.PathLike) else it for it in (model, draft)
        )
        names = {"model": model, "draft": draft, "dtype": dtype, "device": device}
        names |= {"attention": attention, "rope_scaling": rope_scaling or ""}
        names |= {"weights": weights, "draft_weights": draft_weights}
        check_names(names)
        ranks = join()
        ranks.check_same("models, or ways to load them", names)
        place = choose_device(device, ranks)
        options: dict[str, Any] = {"dtype": choose_dtype(dtype, place), "device": place}
        options |= {"attention": attention, "progress": progress}

        self._target = OpenModel(model, rope_scaling=rope_scaling, weights=weights, **options)
        self.config = self._target.config
        if self._target.tokenizer is None:
            raise InputError(
                f"{self.config.name} is a drafter for {self.config.draft_of}, not a model; give it "
                f"as --draft, and {self.config.draft_of} as --model"
            )
        self.tokenizer = self._target.tokenizer
        settings = self._target.checkpoint.generation_config
        self.sampling_defaults = read_sampling(settings, self.config.name)
        self._draft: OpenModel | None = None
        self._draft_weights = draft_weights
        self._is_draft_optional = draft == "auto"
        name = default_draft(model) if draft == "auto" else draft
        if name not in LOOKUPS:
            with self._or_lookup():
                opened = OpenModel(name, **options)
                if opened.tokenizer is not None:
                    check_same_vocabulary(opened.tokenizer, self.tokenizer, opened.config.name)
                self._draft = opened

    def load(self) -> tuple[Llama, Llama | None, Llama | None]:
        """Reads the weights: the model; its draft model, its copy in fewer bits, if used."""
        target = self._target.load()
        drafter = None
        retrieval_model = retrieval_copy(target, self._draft_weights)
        if self._draft is not None:
            with self._or_lookup():
                drafter = self._draft.load(target)
        return target, drafter, retrieval_model

    @contextlib.contextmanager
    def _or_lookup(self) -> Iterator[None]:
        """A drafter that nobody asked for by name may be missing."""
        try:
            yield
        except InputError as error:
            if not self._is_draft_optional:
                raise
            log.warning("%s; suffix lookup takes its place", error)
