"""Models whose files are open: configs and tokenizers are read, the weights not yet.

So whatever is wrong with a prompt or a drafter is found before the minutes that large weights take.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch

from minitri.config import ModelConfig
from minitri.errors import InputError, shorten
from minitri.loading.checkpoint import Checkpoint, load_model, open_checkpoint
from minitri.loading.devices import (
    attention_for,
    attention_name,
    check_names,
    choose_device,
    choose_dtype,
    retrieval_copy,
)
from minitri.loading.fetch import LOOKUPS, default_draft, locate
from minitri.loading.gguf.file import GgufFile
from minitri.loading.gguf.vocabulary import byte_level_bpe, sentencepiece_model
from minitri.loading.hf_config import read_sampling, stretch_rope
from minitri.loading.tokenizer import (
    Backend,
    SentencePieceBackend,
    Tokenizer,
    TokenizersBackend,
    check_same_vocabulary,
)
from minitri.loading.values import explain, read_value
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


def load_tokenizer(checkpoint: Checkpoint, config: ModelConfig) -> Tokenizer:
    """The tokenizer of an opened model. Raises `InputError` if there is none that fits."""
    with explain(f"the tokenizer of {checkpoint.path} is missing or damaged"):
        if isinstance(checkpoint, GgufFile):
            backend, add_bos = _from_gguf(checkpoint)
        else:
            backend, add_bos = _from_folder(checkpoint.folder)
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


def _from_folder(folder: Path) -> tuple[Backend, bool]:
    """The backend, and whether prompts start with BOS unless the settings say otherwise."""
    file, model = folder / "tokenizer.json", folder / "tokenizer.model"
    if model.is_file() and not file.exists():
        return SentencePieceBackend(model.read_bytes()), True
    if not file.is_file():
        raise FileNotFoundError("expected tokenizer.json or tokenizer.model")
    pipeline = tokenizers.Tokenizer.from_file(str(file))
    pipeline.no_truncation()
    pipeline.no_padding()
    return TokenizersBackend(pipeline), bool(pipeline.encode("", add_special_tokens=True).ids)


def _from_gguf(file: GgufFile) -> tuple[Backend, bool]:
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        return SentencePieceBackend(sentencepiece_model(file)), True
    if kind == "gpt2":
        return TokenizersBackend(byte_level_bpe(file)), False
    raise ValueError(f"it is of type {shorten(repr(kind), 60)}, neither gpt2 nor llama")


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
