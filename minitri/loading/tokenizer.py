"""Text to token ids and back: sentencepiece, tokenizer.json, and the tokenizer in a GGUF file.

The libraries tokenize. This file picks the right one, adds the BOS token where the model wants it,
and streams: `IncrementalDecoder` gives the text of a growing sequence piece by piece, never half a
UTF-8 character, never without its spaces.
"""

from __future__ import annotations

import importlib
import os.path
import re
from pathlib import Path
from typing import Any, Protocol

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from minitri.errors import InputError, shorten
from minitri.loading.checkpoint import Checkpoint, read_json
from minitri.loading.gguf_file import GgufFile
from minitri.model.config import ModelConfig
from minitri.settings import check_unicode

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Backend(Protocol):
    """A tokenizer library behind three calls."""

    num_tokens: int
    """One more than the largest token id."""

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Ids without BOS or EOS: all of them, or at least the first `max_tokens`."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text; control tokens give nothing, bytes that are no UTF-8 give U+FFFD."""
        ...

    def token(self, number: int) -> str | None:
        """How the vocabulary spells a token; None for an unused id."""
        ...


class SentencePieceBackend:
    """A `tokenizer.model` with Llama-2's conventions: byte fallback, a space before the text."""

    def __init__(self, model: bytes) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.num_tokens = self._processor.vocab_size()

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:  # noqa: ARG002
        return list(self._processor.encode(text))

    def decode(self, ids: list[int]) -> str:
        # A model's vocabulary may be padded beyond the pieces, and the library refuses such ids.
        return str(self._processor.decode([token for token in ids if token < self.num_tokens]))

    def token(self, number: int) -> str | None:
        return str(self._processor.id_to_piece(number))


class TokenizersBackend:
    """A pipeline of the `tokenizers` package, which knows control tokens written out in a text."""

    def __init__(self, pipeline: tokenizers.Tokenizer) -> None:
        self._pipeline = pipeline
        self.num_tokens = 1 + max(pipeline.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:  # noqa: ARG002
        return self._pipeline.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._pipeline.decode(ids, skip_special_tokens=True)

    def token(self, number: int) -> str | None:
        return self._pipeline.id_to_token(number)


class GgufBackend(TokenizersBackend):
    """A byte-level BPE built here. For the first tokens of a long text it reads little of the rest.

    Text may be cut between a letter and a space: no pattern of words here goes on from a letter to
    a space or looks ahead from a letter, so words and tokens before the cut are those of the whole
    text. Only an added token could span the cut; if one could, nothing is cut.
    """

    _CUT = re.compile("[A-Za-z](?= )")

    def __init__(self, pipeline: tokenizers.Tokenizer) -> None:
        super().__init__(pipeline)
        added = pipeline.get_added_tokens_decoder().values()
        self._can_cut = not any(self._CUT.search(token.content) for token in added)

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        if max_tokens is not None and self._can_cut:
            num_chars = 6 * max_tokens
            while cut := self._CUT.search(text, num_chars):
                ids = super().encode(text[: cut.end()])
                if len(ids) >= max_tokens:
                    return ids
                num_chars = 2 * cut.end()
        return super().encode(text)


class Tokenizer:
    """A tokenizer together with the model's rule for BOS."""

    def __init__(self, backend: Backend, bos_token_id: int | None) -> None:
        """`bos_token_id` goes before every prompt that does not begin with it; None: no BOS."""
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.num_tokens = backend.num_tokens

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Ids of a prompt, with BOS if the model wants it; at most `max_tokens` of them.

        Raises `InputError` for lone surrogates.
        """
        check_unicode(text, "the prompt")
        ids = self._backend.encode(text, max_tokens)
        if self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids[:max_tokens]

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, without control tokens."""
        return self._backend.decode(ids)

    def token(self, number: int) -> str | None:
        """How the vocabulary spells a token; None for an unused id."""
        return self._backend.token(number)


class IncrementalDecoder:
    """The text of a growing token sequence, piece by piece.

    How a token reads depends on its neighbours: a leading space, one character whose bytes are
    several tokens. So each step decodes a short window twice, with and without the new tokens, and
    gives out the difference. A window that ends in U+FFFD may end in half a character, and waits.
    """

    CONTEXT = 6
    """Tokens of the prompt that the first new token is decoded after."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = prompt[-self.CONTEXT :]
        self._window = 0  # first token of the window
        self._read = len(self._ids)  # first token whose text has not been given out

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        self._ids.append(token)
        if self._tokenizer.decode(self._ids[self._window :]).endswith("\ufffd"):
            return ""
        return self.flush()

    def flush(self) -> str:
        """All text not given out yet, whatever may follow; broken characters as U+FFFD."""
        known = self._tokenizer.decode(self._ids[self._window : self._read])
        text = self._tokenizer.decode(self._ids[self._window :])
        self._window, self._read = self._read, len(self._ids)
        # Not just text[len(known):]: a prompt may end inside a character, then `known` in U+FFFD.
        return text[len(os.path.commonprefix((known, text))) :]  # noqa: RUF071


def load_tokenizer(checkpoint: Checkpoint, config: ModelConfig) -> Tokenizer:
    """The tokenizer of an opened model. Raises `InputError` if there is none that fits."""
    if isinstance(checkpoint, GgufFile):
        with checkpoint.reading("its tokenizer's tables"):
            backend, add_bos = _from_gguf(checkpoint)
    else:
        backend, add_bos = _from_folder(checkpoint.folder)
    if backend.num_tokens > config.vocab_size:
        raise InputError(
            f"the tokenizer of {checkpoint.path} has {backend.num_tokens} tokens but the model's "
            f"vocabulary has {config.vocab_size}; they belong to different models"
        )
    if add_bos and (config.bos_token_id is None or config.bos_token_id >= config.vocab_size):
        raise InputError(
            f"{checkpoint.path} asks for a BOS token but its config has bos_token_id="
            f"{config.bos_token_id}; set it to a token below {config.vocab_size}"
        )
    return Tokenizer(backend, config.bos_token_id if add_bos else None)


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
                "--draft ngram"
            )


def _from_folder(folder: Path) -> tuple[Backend, bool]:
    """The backend, and whether prompts start with BOS."""
    file = folder / "tokenizer_config.json"
    settings = read_json(file) if file.exists() else {}
    backend: Backend
    try:
        if (file := folder / "tokenizer.json").exists():
            pipeline = tokenizers.Tokenizer.from_file(str(file))
            pipeline.no_truncation()
            pipeline.no_padding()
            adds_bos = bool(pipeline.encode("", add_special_tokens=True).ids)
            backend = TokenizersBackend(pipeline)
        elif (file := folder / "tokenizer.model").exists():
            backend, adds_bos = SentencePieceBackend(file.read_bytes()), True
        else:
            raise InputError(
                f"{folder} has no tokenizer; expected tokenizer.json or tokenizer.model"
            )
    except InputError:
        raise
    except Exception as error:  # the packages raise nothing more specific
        raise InputError(f"{file} is damaged ({shorten(error)}); download it again") from None
    return backend, bool(settings.get("add_bos_token", adds_bos))


def _from_gguf(file: GgufFile) -> tuple[Backend, bool]:
    """The backend, and whether prompts start with BOS."""
    kind = file.get("tokenizer.ggml.model")
    backend: Backend
    if kind == "gpt2":
        backend = GgufBackend(_gguf_byte_level_bpe(file))
    elif kind == "llama":
        backend = SentencePieceBackend(_gguf_sentencepiece(file))
    else:
        raise InputError(
            f"{file.path.name} has a tokenizer of type {kind!r}; minitri reads gpt2 and llama ones"
        )
    return backend, bool(file.get("tokenizer.ggml.add_bos_token", kind == "llama"))


def _gguf_byte_level_bpe(file: GgufFile) -> tokenizers.Tokenizer:
    """Byte-level BPE; `tokenizer.ggml.pre` names how a text is cut into words first."""
    llama3_words = tokenizers.Regex(_LLAMA3_WORDS)
    gpt2 = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    smollm = [pre_tokenizers.Digits(individual_digits=True), *gpt2]
    llama3 = [
        pre_tokenizers.Split(llama3_words, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    words: dict[str, Any] = {"default": gpt2, "smollm": smollm, "llama-bpe": llama3}
    words |= {"gpt-2": gpt2, "llama3": llama3}
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in words:
        raise InputError(
            f"{file.path.name} cuts words in the way {pre!r}; minitri knows {', '.join(words)}"
        )
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges")]
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=words[pre] is llama3)
    pipeline = tokenizers.Tokenizer(bpe)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(words[pre])
    pipeline.decoder = decoders.ByteLevel()
    CONTROL, USER_DEFINED = 3, 4
    token_types = file.get("tokenizer.ggml.token_type") or []
    for token, token_type in zip(tokens, token_types, strict=False):
        if token_type == CONTROL:
            added = tokenizers.AddedToken(token, special=True, normalized=False)
            pipeline.add_special_tokens([added])
        elif token_type == USER_DEFINED:
            added = tokenizers.AddedToken(token, special=False, normalized=False)
            pipeline.add_tokens([added])
    return pipeline


def _gguf_sentencepiece(file: GgufFile) -> bytes:
    """A sentencepiece model with the pieces, scores and types of the file, serialised."""
    try:
        messages: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError:
        raise InputError(
            f"{file.path.name} has a sentencepiece tokenizer and the package protobuf is not "
            "installed; run: pip install 'minitri[gguf]'"
        ) from None
    model = messages.ModelProto()
    columns = [file.get(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type")]
    for piece, score, token_type in zip(*columns, strict=True):
        model.pieces.add(piece=piece, score=score, type=token_type)
    model.trainer_spec.model_type = messages.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id = file.get("tokenizer.ggml.unknown_token_id", 0)
    model.trainer_spec.bos_id = file.get("tokenizer.ggml.bos_token_id", 1)
    model.trainer_spec.eos_id = file.get("tokenizer.ggml.eos_token_id", 2)
    model.trainer_spec.pad_id = -1
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    return bytes(model.SerializeToString())
