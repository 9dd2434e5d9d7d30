"""Text to token ids and back: sentencepiece, tokenizer.json, and the tokenizer in a GGUF file.

The libraries tokenize. This file picks the right one, adds the BOS token where the model wants it,
and writes conversations as the model's chat template says.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import sentencepiece
import tokenizers

from minitri.config import ModelConfig
from minitri.errors import InputError, check_unicode, shorten
from minitri.loading.chat_template import (
    ChatTemplate,
    Message,
    read_chat_template,
    special_tokens_of,
)
from minitri.loading.checkpoint import Checkpoint
from minitri.loading.damage import explain
from minitri.loading.gguf.file import GgufFile
from minitri.loading.gguf.vocabulary import byte_level_bpe, sentencepiece_model
from minitri.loading.hf_config import read_value
from minitri.loading.hf_folder import read_json

SETTINGS = "tokenizer_config.json"


class SentencePieceBackend:
    """A `tokenizer.model` with Llama-2's conventions: byte fallback, a space before the text."""

    def __init__(self, model: bytes) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.num_tokens = self._processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def encode_marked(self, text: str) -> list[int]:
        """Token ids of a text in which control tokens are spelled out."""
        ids = range(self.num_tokens)
        marks = {self.token(token): token for token in ids if self._processor.is_control(token)}
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        pieces = ([marks[part]] if part in marks else self.encode(part) for part in parts)
        return [token for piece in pieces for token in piece]

    def decode(self, ids: list[int]) -> str:
        # A model's vocabulary may be padded beyond the pieces, and the library refuses such ids.
        return str(self._processor.decode([token for token in ids if token < self.num_tokens]))

    def token(self, number: int) -> str:
        return str(self._processor.id_to_piece(number))


class TokenizersBackend:
    """A pipeline of the `tokenizers` package, which knows control tokens written out in a text."""

    def __init__(self, pipeline: tokenizers.Tokenizer) -> None:
        self._pipeline = pipeline
        vocab = pipeline.get_vocab(with_added_tokens=True)
        self.num_tokens = 1 + max(vocab.values(), default=-1)

    def encode(self, text: str) -> list[int]:
        return self._pipeline.encode(text, add_special_tokens=False).ids

    encode_marked = encode

    def decode(self, ids: list[int]) -> str:
        return self._pipeline.decode(ids, skip_special_tokens=True)

    def token(self, number: int) -> str | None:
        return self._pipeline.id_to_token(number)


Backend = SentencePieceBackend | TokenizersBackend


class Tokenizer:
    """A tokenizer library together with the model's rules for BOS and for conversations."""

    def __init__(
        self, backend: Backend, bos_token_id: int | None, template: str | None = None,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`bos_token_id` goes before every prompt that does not begin with it; None: no BOS.

        `template` is the source of a chat template, `special_tokens` what it knows by name.
        """
        self._backend, self._template = backend, template
        self._special_tokens = special_tokens
        self.bos_token_id = bos_token_id
        self.num_tokens = backend.num_tokens  # one more than the largest token id

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, BOS first. Raises `InputError` for lone surrogates."""
        check_unicode(text, "the prompt")
        ids = self._backend.encode(text)
        if self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    @functools.cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one. Raises `InputError` if that is broken."""
        return ChatTemplate(self._template, self._special_tokens) if self._template else None

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the model's next answer begins.

        Raises `InputError` if the model has no template, or if that refuses the conversation.
        """
        if self.chat_template is None:
            raise InputError(
                "this model has no chat template: it completes texts; use an instruct model, or "
                "write the conversation into the prompt"
            )
        return self.encode_marked(self.chat_template.render(messages))

    def encode_marked(self, text: str) -> list[int]:
        """Token ids of a piece of a text in which control tokens are spelled out; no BOS is added.

        Raises `InputError` for lone surrogates.
        """
        check_unicode(text, "the conversation")
        return self._backend.encode_marked(text)

    def decode(self, ids: list[int]) -> str:
        """Text without control tokens; bytes that are no UTF-8 give U+FFFD."""
        return self._backend.decode(ids)

    def token(self, number: int) -> str | None:
        """How the vocabulary spells a token; None for an unused id."""
        return self._backend.token(number)


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


def check_same_vocabulary(draft: Tokenizer, target: Tokenizer, draft_name: str) -> None:
    """Raises `InputError` unless the two tokenizers agree on every token that both have.

    Either may have more tokens at its end, or a padded model. What the drafter lacks it never
    guesses, and what the target lacks is cut off the drafter's distributions.
    """
    for token in range(min(draft.num_tokens, target.num_tokens)):
        theirs, ours = draft.token(token), target.token(token)
        if theirs != ours:
            raise InputError(
                f"the drafter {draft_name} has another vocabulary: its token {token} is "
                f"{theirs!r}, the target's is {ours!r}; use a drafter of the target's family, or "
                "--draft suffix"
            )


def _chat_template(
    checkpoint: Checkpoint, config: ModelConfig, backend: Backend
) -> tuple[str | None, dict[str, str]]:
    """The source of a model's chat template, and the special tokens that it knows by name."""
    ids = {"bos_token": config.bos_token_id, "eos_token": (*config.eos_token_ids, None)[0]}
    known = ((name, i) for name, i in ids.items() if i is not None and i < backend.num_tokens)
    tokens = {name: backend.token(i) or "" for name, i in known}
    if isinstance(checkpoint, GgufFile):
        settings, stored = {}, checkpoint.get("tokenizer.chat_template")
    else:
        file, own = (checkpoint.folder / name for name in (SETTINGS, "chat_template.jinja"))
        settings = read_json(file, or_nothing=True)
        with explain(f"{own} cannot be read", OSError, ValueError):
            stored = own.read_text("utf-8") if own.exists() else None
    with explain(f"{checkpoint.path} holds a wrong value", TypeError, advice="correct it"):
        return read_chat_template(settings, stored), tokens | special_tokens_of(settings)


def _from_folder(folder: Path) -> tuple[Backend, bool]:
    """The backend, and whether prompts start with BOS."""
    settings_file, file = folder / SETTINGS, folder / "tokenizer.json"
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
            backend, add_bos = SentencePieceBackend(file.read_bytes()), True
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
