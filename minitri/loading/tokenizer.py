"""Text to token ids and back: sentencepiece, tokenizer.json, and the tokenizer in a GGUF file.

The libraries tokenize. This file picks the right one, adds the BOS token where the model wants it,
and streams: `IncrementalDecoder` gives the text of a growing sequence piece by piece, never half a
UTF-8 character, never without its spaces.
"""

import os.path
import re
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from minitri.errors import InputError
from minitri.loading.checkpoint import Checkpoint, read_json
from minitri.loading.damage import explain
from minitri.loading.gguf_file import GgufFile
from minitri.model.config import ModelConfig
from minitri.settings import check_unicode

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUT = re.compile("[A-Za-z](?= )")
"""Where to cut a text whose first tokens are wanted. No pattern of words here goes on from a letter
to a space or looks ahead from a letter; only an added token could span the cut."""


class SentencePieceBackend:
    """A `tokenizer.model` with Llama-2's conventions: byte fallback, a space before the text."""

    can_cut = False

    def __init__(self, model: bytes) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.num_tokens = self._processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

    def decode(self, ids: list[int]) -> str:
        # A model's vocabulary may be padded beyond the pieces, and the library refuses such ids.
        return str(self._processor.decode([token for token in ids if token < self.num_tokens]))

    def token(self, number: int) -> str | None:
        return str(self._processor.id_to_piece(number))


class TokenizersBackend:
    """A pipeline of the `tokenizers` package, which knows control tokens written out in a text.

    `can_cut`: the beginning of a text, up to a `_CUT`, has the first tokens of the whole text.
    """

    def __init__(self, pipeline: tokenizers.Tokenizer, *, can_cut: bool = False) -> None:
        self._pipeline, self.can_cut = pipeline, can_cut
        self.num_tokens = 1 + max(pipeline.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> list[int]:
        return self._pipeline.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._pipeline.decode(ids, skip_special_tokens=True)

    def token(self, number: int) -> str | None:
        return self._pipeline.id_to_token(number)


Backend = SentencePieceBackend | TokenizersBackend


class Tokenizer:
    """A tokenizer library together with the model's rule for BOS."""

    def __init__(self, backend: Backend, bos_token_id: int | None) -> None:
        """`bos_token_id` goes before every prompt that does not begin with it; None: no BOS."""
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.num_tokens = backend.num_tokens  # one more than the largest token id

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """At most `max_tokens` ids, BOS among them. Raises `InputError` for lone surrogates."""
        check_unicode(text, "the prompt")
        wanted = max_tokens if max_tokens is not None and self._backend.can_cut else len(text)
        num_chars = 6 * wanted
        while cut := _CUT.search(text, num_chars):
            ids = self._backend.encode(text[: cut.end()])
            if len(ids) >= wanted:
                break
            num_chars = 2 * cut.end()
        else:
            ids = self._backend.encode(text)
        if self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids[:max_tokens]

    def decode(self, ids: list[int]) -> str:
        """Text without control tokens; bytes that are no UTF-8 give U+FFFD."""
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
    settings_file, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
    if not file.exists():
        file = folder / "tokenizer.model"
    if not file.exists():
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
    return backend, bool(settings.get("add_bos_token", add_bos))


def _from_gguf(file: GgufFile) -> tuple[Backend, bool]:
    """The backend, and whether prompts start with BOS."""
    kind = file.get("tokenizer.ggml.model")
    readers = {"gpt2": _gguf_byte_level_bpe, "llama": _gguf_sentencepiece}
    if kind not in readers:
        raise InputError(
            f"{file.path.name} has a tokenizer of type {kind!r}; minitri reads gpt2 and llama ones"
        )
    return readers[kind](file), bool(file.get("tokenizer.ggml.add_bos_token", kind == "llama"))


def _gguf_byte_level_bpe(file: GgufFile) -> Backend:
    """Byte-level BPE; `tokenizer.ggml.pre` names how a text is cut into words first."""
    gpt2: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    smollm = [pre_tokenizers.Digits(individual_digits=True), *gpt2]
    llama3 = [
        pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    words = {"default": gpt2, "smollm": smollm, "llama-bpe": llama3}
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
    types = zip(tokens, file.get("tokenizer.ggml.token_type") or [], strict=False)
    added = {token: kind == CONTROL for token, kind in types if kind in (CONTROL, USER_DEFINED)}
    for token, special in added.items():
        pipeline.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False)])
    return TokenizersBackend(pipeline, can_cut=not any(map(_CUT.search, added)))


def _gguf_sentencepiece(file: GgufFile) -> Backend:
    """A sentencepiece model with the pieces, scores and types of the file."""
    module = "sentencepiece.sentencepiece_model_pb2"
    messages = file.package("protobuf", "has a sentencepiece tokenizer", module)
    model = messages.ModelProto()
    columns = [file.get(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type")]
    for piece, score, token_type in zip(*columns, strict=True):
        model.pieces.add(piece=piece, score=score, type=token_type)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = messages.TrainerSpec.BPE, True
    trainer.unk_id = file.get("tokenizer.ggml.unknown_token_id", 0)
    trainer.bos_id = file.get("tokenizer.ggml.bos_token_id", 1)
    trainer.eos_id = file.get("tokenizer.ggml.eos_token_id", 2)
    trainer.pad_id = -1
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    normalizer.remove_extra_whitespaces, normalizer.escape_whitespaces = False, True
    return SentencePieceBackend(model.SerializeToString())
