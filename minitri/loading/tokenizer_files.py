"""The tokenizer of an opened model: which library it needs, BOS, and the chat template."""

from pathlib import Path

import tokenizers

from minitri.config import ModelConfig
from minitri.errors import InputError, shorten
from minitri.loading.chat_template import read_chat_template, special_tokens_of
from minitri.loading.checkpoint import Checkpoint
from minitri.loading.gguf.file import GgufFile
from minitri.loading.gguf.vocabulary import byte_level_bpe, sentencepiece_model
from minitri.loading.hf_config import explain, read_value
from minitri.loading.hf_folder import read_json
from minitri.loading.tokenizer import Backend, SentencePieceBackend, Tokenizer, TokenizersBackend

SETTINGS = "tokenizer_config.json"


def load_tokenizer(checkpoint: Checkpoint, config: ModelConfig) -> Tokenizer:
    """The tokenizer of an opened model. Raises `InputError` if there is none that fits."""
    if isinstance(checkpoint, GgufFile):
        with checkpoint.reading("its tokenizer's tables"):
            backend, add_bos = _from_gguf(checkpoint)
    else:
        backend, add_bos = _from_folder(checkpoint.folder)
    if not 1 <= backend.num_tokens <= config.vocab_size:
        raise InputError(
            f"the tokenizer of {checkpoint.path} has {backend.num_tokens} tokens but the model's "
            f"vocabulary has {config.vocab_size}; they belong to different models"
        )
    if add_bos and (config.bos_token_id is None or config.bos_token_id >= config.vocab_size):
        raise InputError(
            f"{checkpoint.path} asks for a BOS token but its config has bos_token_id="
            f"{config.bos_token_id}; set it to a token below {config.vocab_size}"
        )
    bos = config.bos_token_id if add_bos else None
    return Tokenizer(backend, bos, *_chat_template(checkpoint, config, backend))


def _chat_template(
    checkpoint: Checkpoint, config: ModelConfig, backend: Backend
) -> tuple[str | None, dict[str, str]]:
    """The source of a model's chat template, and the special tokens that it knows by name."""
    ids = {"bos_token": config.bos_token_id, "eos_token": (*config.eos_token_ids, None)[0]}
    known = ((name, i) for name, i in ids.items() if i is not None and i < backend.num_tokens)
    tokens = {name: backend.token(i) or "" for name, i in known}
    if isinstance(checkpoint, GgufFile):
        settings = {}
        stored = checkpoint.get("tokenizer.chat_template")
    else:
        file, own = (checkpoint.folder / name for name in (SETTINGS, "chat_template.jinja"))
        settings = read_json(file, or_nothing=True)
        with explain(f"{own} cannot be read", OSError, ValueError):
            stored = own.read_text("utf-8") if own.exists() else None
    with explain(f"{checkpoint.path} holds a wrong value", TypeError, advice="correct it"):
        return read_chat_template(settings, stored), tokens | special_tokens_of(settings)


def _from_folder(folder: Path) -> tuple[Backend, bool]:
    """The backend, and whether prompts start with BOS."""
    settings_file = folder / SETTINGS
    file = folder / "tokenizer.json"
    settings = read_json(settings_file, or_nothing=True)
    if not file.exists():
        file = folder / "tokenizer.model"
    if not file.is_file():
        raise InputError(f"{folder} has no tokenizer; expected tokenizer.json or tokenizer.model")
    backend: Backend
    with explain(f"{file} is damaged", Exception):  # the packages raise nothing more specific
        if file.suffix == ".json":
            pipeline = tokenizers.Tokenizer.from_file(str(file))
            pipeline.no_truncation()
            pipeline.no_padding()
            add_bos = bool(pipeline.encode("", add_special_tokens=True).ids)
            backend = TokenizersBackend(pipeline)
        else:
            backend = SentencePieceBackend(file.read_bytes())
            add_bos = True
    with explain(f"{settings_file} holds a wrong value", TypeError, advice="correct it"):
        return backend, read_value(settings, "add_bos_token", bool, add_bos)


def _from_gguf(file: GgufFile) -> tuple[Backend, bool]:
    """The backend, and whether prompts start with BOS."""
    kind = file.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise InputError(
            f"{file.path.name} has a tokenizer of type {shorten(repr(kind), 60)}; minitri reads "
            "gpt2 and llama ones"
        )
    backend: Backend
    if kind == "llama":
        backend = SentencePieceBackend(sentencepiece_model(file))
    else:
        backend = TokenizersBackend(byte_level_bpe(file))
    return backend, file.flag("tokenizer.ggml.add_bos_token", kind == "llama")
