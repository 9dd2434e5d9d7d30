"""Models whose files are open: configs and tokenizers are read, the weights not yet.

So whatever is wrong with a prompt or a drafter is found before the minutes that large weights take.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from minitri.config import ModelConfig
from minitri.errors import InputError, explain, shorten
from minitri.loading.checkpoint import Checkpoint, load_model, open_checkpoint
from minitri.loading.devices import (
    ModelChoice,
    attention_for,
    attention_name,
    choose_device,
    choose_dtype,
    retrieval_copy,
)
from minitri.loading.fetch import LOOKUPS, default_draft, locate
from minitri.loading.hf_config import read_sampling, stretch_rope
from minitri.loading.tokenizer import Tokenizer, check_same_vocabulary
from minitri.loading.values import read_value
from minitri.model.execution import Ranks
from minitri.model.llama import Llama
from minitri.parallel.ranks import join

log = logging.getLogger("minitri")


class OpenModel:
    """Finds or fetches the files of a model, and reads all but the weights."""

    def __init__(
        self,
        choice: ModelChoice,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: bool = False,
    ) -> None:
        """Raises `InputError`."""
        located = join().ask_first(lambda: locate(choice.model, progress=progress))
        self.checkpoint = open_checkpoint(located.path)
        config = self.checkpoint.config(located.name)
        if located.context:
            config = dataclasses.replace(config, context_length=located.context)
        stretch = choice.rope_scaling
        self.config = config if stretch is None else stretch_rope(config, stretch)
        has_tokenizer = config.draft_of is None  # else it reads tokens from its target's table
        self.tokenizer = load_tokenizer(self.checkpoint, config) if has_tokenizer else None
        attend = attention_for(device, dtype, config, choice.attention)
        self._options: dict[str, Any] = {"dtype": dtype, "device": device, "attend": attend}
        self._options |= {"native": choice.weights == "native", "progress": progress}

    def load(self, target: Llama | None = None) -> Llama:
        """Reads the weights. `target` lends its embedding table to a drafter that has none."""
        ranks = join() if target is None else Ranks()  # a drafter is whole on every rank
        options = {**self._options, "target": target, "ranks": ranks}
        model = load_model(self.checkpoint, self.config, **options)
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
    """A model and its drafter, all but their weights."""

    def __init__(self, choice: ModelChoice, *, progress: bool = False) -> None:
        ranks = join()
        ranks.check_same("models, or ways to load them", choice)
        device = choose_device(choice.device, ranks)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
            ranks.sum(torch.zeros(1, device=device))  # NCCL takes memory before the model does
        dtype = choose_dtype(choice.dtype, device)
        options: dict[str, Any] = {"dtype": dtype, "device": device, "progress": progress}
        self._target = OpenModel(choice, **options)
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
        self._choice = choice
        name = default_draft(choice.model) if choice.draft == "auto" else choice.draft
        if name not in LOOKUPS:
            with self._or_lookup():
                plain = dataclasses.replace(choice, model=name, rope_scaling=None, weights="auto")
                opened = OpenModel(plain, **options)
                if opened.tokenizer is not None:
                    check_same_vocabulary(opened.tokenizer, self.tokenizer, opened.config.name)
                self._draft = opened

    def load(self) -> tuple[Llama, Llama | None, Llama | None]:
        """Reads the weights: the model; its draft model, its copy in fewer bits, if used."""
        target = self._target.load()
        drafter = None
        retrieval_model = retrieval_copy(target, self._choice.draft_weights)
        if self._draft is not None:
            with self._or_lookup():
                drafter = self._draft.load(target)
        weights = [it.execution.fingerprint for it in (target, drafter) if it is not None]
        found = self.config, self.sampling_defaults, weights
        join().check_same("model files, or memory for the drafter", found)
        return target, drafter, retrieval_model

    @contextlib.contextmanager
    def _or_lookup(self) -> Iterator[None]:
        """A drafter that nobody asked for by name may be missing."""
        try:
            yield
        except InputError as error:
            if self._choice.draft != "auto":
                raise
            log.warning("%s; suffix lookup takes its place", error)


def load_tokenizer(checkpoint: Checkpoint, config: ModelConfig) -> Tokenizer:
    """The tokenizer of an opened model. Raises `InputError` if there is none that fits."""
    with explain(f"the tokenizer of {checkpoint.path} is missing or damaged"):
        backend, add_bos = checkpoint.tokenizer()
        settings = checkpoint.tokenizer_config
        add_bos = read_value(settings, "add_bos_token", bool, add_bos)
        template = _chat_template(settings)
    if not 1 <= backend.num_tokens <= config.vocab_size:
        raise InputError(
            f"the tokenizer of {checkpoint.path} has {backend.num_tokens} tokens but the model's "
            f"vocabulary has {config.vocab_size}; they belong to different models"
        )
    bos = config.bos_token_id
    if add_bos and (bos is None or bos >= config.vocab_size):
        raise InputError(
            f"{checkpoint.path} asks for a BOS token but its config has bos_token_id={bos}; set it "
            f"to a token below {config.vocab_size}"
        )
    ids = {"bos_token": bos, "eos_token": (*config.eos_token_ids, None)[0]}
    known = ((name, i) for name, i in ids.items() if i is not None and i < backend.num_tokens)
    special = {name: backend.token(i) or "" for name, i in known} | _special_tokens(settings)
    return Tokenizer(backend, bos if add_bos else None, template, special)


def _chat_template(settings: Mapping[str, Any]) -> str | None:
    """The source that a tokenizer's settings hold, if any; of several named ones the default."""
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {str(it["name"]): it["template"] for it in source}
        source = named.get("default", next(iter(named.values()), None))
    if not (source is None or isinstance(source, str)):
        raise TypeError(f"chat_template is {shorten(repr(source), 60)}, not a text")
    return source


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of special tokens that a tokenizer's settings name, by their names there."""
    found = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
