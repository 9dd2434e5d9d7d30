"""The tokenizer of an opened model: which library it needs, BOS, and the chat template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from minitri.config import ModelConfig
from minitri.errors import InputError, shorten
from minitri.loading.checkpoint import Checkpoint
from minitri.loading.gguf.file import GgufFile
from minitri.loading.gguf.vocabulary import byte_level_bpe, sentencepiece_model
from minitri.loading.tokenizer import Backend, SentencePieceBackend, Tokenizer, TokenizersBackend
from minitri.loading.values import explain, read_value


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
