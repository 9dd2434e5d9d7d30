"""Text to token ids and back: sentencepiece, tokenizer.json, and the tokenizer in a GGUF file.

The libraries tokenize. This file picks the right one, adds the BOS token where the model wants it,
and streams: `IncrementalDecoder` gives the text of a growing sequence piece by piece, never half a
UTF-8 character, never without its spaces.
"""

import json
import os.path
import re
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from minitri.config import ModelConfig
from minitri.errors import InputError, check_unicode, shorten
from minitri.loading.checkpoint import Checkpoint, read_json
from minitri.loading.damage import explain
from minitri.loading.gguf.file import GgufFile
from minitri.loading.hf_config import read_value

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS = {"Regex": _LLAMA3_WORDS}, {"Regex": _QWEN_WORDS}
_SPACE = {"String": " "}
_LETTERS, _ENDS = "A-Za-zÀ-ÖØ-öø-ÿА-я一-龥ぁ-んァ-ヴ가-힣", " \n，。、"
_CUT = re.compile(f"[{_LETTERS}](?=[{_ENDS}])")
"""Where to cut a text whose first tokens are wanted: behind a letter that ends a word. No known
pattern of words goes on from there, or looks ahead from a letter. Where words are not split, a
merge across the cut would make a token that has both characters; `_ACROSS` finds such tokens."""
_ACROSS = re.compile(f"[{_LETTERS}][{_ENDS}▁]")


class SentencePieceBackend:
    """A `tokenizer.model` with Llama-2's conventions: byte fallback, a space before the text."""

    def __init__(self, model: bytes) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.num_tokens = self._processor.vocab_size()
        ids = range(self.num_tokens)
        has_bytes = any(map(self._processor.is_byte, ids))  # else unknown neighbours are one token
        self._can_cut = has_bytes and not any(_ACROSS.search(self.token(token)) for token in ids)

    def cut(self, text: str, start: int) -> int:
        """Where `text` can be cut, at `start` or later, so that the tokens before the cut stay."""
        found = _CUT.search(text, start) if self._can_cut else None
        if found is None:
            return len(text)
        read = text[: found.end() + 100].rstrip(" ")  # a normalizer may look at neighbours
        plain = read.replace(" ", "▁")
        is_plain = self._processor.normalize(read) in (plain, "▁" + plain)
        return found.end() if is_plain else len(text)

    def encode(self, text: str) -> list[int]:
        return list(self._processor.encode(text))

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
        splits, model = _splits_words(pipeline), pipeline.model
        added = [token.content for token in pipeline.get_added_tokens_decoder().values()]
        self._can_cut = (
            splits is not None
            and isinstance(model, models.BPE)
            and not (model.dropout or model.end_of_word_suffix)
            and (model.byte_fallback or not model.fuse_unk)
            and not any(map(_ACROSS.search, added if splits else vocab))
        )

    def cut(self, text: str, start: int) -> int:
        """Where `text` can be cut, at `start` or later, so that the tokens before the cut stay."""
        found = _CUT.search(text, start) if self._can_cut else None
        return len(text) if found is None else found.end()

    def encode(self, text: str) -> list[int]:
        return self._pipeline.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._pipeline.decode(ids, skip_special_tokens=True)

    def token(self, number: int) -> str | None:
        return self._pipeline.id_to_token(number)


def _splits_words(pipeline: tokenizers.Tokenizer) -> bool | None:
    """Whether words are split before they are merged; None if a part may look beyond a `_CUT`."""
    parts: list[dict[str, Any]] = []
    for stage in (pipeline.normalizer, pipeline.pre_tokenizer):
        state = {} if stage is None else json.loads(stage.__getstate__())
        parts += state.get("normalizers") or state.get("pretokenizers") or [state] * bool(state)
    splits = False
    for part in parts:
        kind, pattern = part["type"], part.get("pattern")
        known = ("ByteLevel", "Digits", "Metaspace", "Prepend", "NFC")
        is_known = kind in known or pattern == _SPACE
        is_split = pattern in _WORDS and part.get("behavior") == "Isolated"
        if is_split or part.get("use_regex"):
            splits = True
        elif not is_known or (kind == "ByteLevel" and not splits):
            return None
    return splits


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
        end = len(text) if max_tokens is None else self._backend.cut(text, 6 * max_tokens)
        while len(ids := self._backend.encode(text[:end])) < (max_tokens or 0) and end < len(text):
            end = self._backend.cut(text, 2 * end)
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
                "--draft suffix"
            )


def _from_folder(folder: Path) -> tuple[Backend, bool]:
    """The backend, and whether prompts start with BOS."""
    settings_file, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    settings = read_json(settings_file) if settings_file.exists() else {}
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
    readers = {"gpt2": _gguf_byte_level_bpe, "llama": _gguf_sentencepiece}
    if kind not in readers:
        raise InputError(
            f"{file.path.name} has a tokenizer of type {shorten(repr(kind), 60)}; minitri reads "
            "gpt2 and llama ones"
        )
    return readers[kind](file), file.flag("tokenizer.ggml.add_bos_token", kind == "llama")


def _gguf_byte_level_bpe(file: GgufFile) -> Backend:
    """Byte-level BPE; `tokenizer.ggml.pre` names how a text is cut into words first."""
    gpt2: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    smollm = [pre_tokenizers.Digits(individual_digits=True), *gpt2]
    llama3, qwen = (
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern["Regex"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        for pattern in _WORDS
    )
    words = {"default": gpt2, "smollm": smollm, "llama-bpe": llama3, "qwen2": qwen}
    words |= {"gpt-2": gpt2, "llama3": llama3}
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in words:
        raise InputError(
            f"{file.path.name} cuts words in the way {shorten(repr(pre), 60)}; minitri knows "
            f"{', '.join(words)}"
        )
    tokens = file.column("tokenizer.ggml.tokens", str)
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise ValueError(f"{len(tokens) - len(vocab)} of {len(tokens)} tokens are there twice")
    merges = [tuple(merge.split(" ")) for merge in file.column("tokenizer.ggml.merges", str)]
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=words[pre] is llama3)
    pipeline = tokenizers.Tokenizer(bpe)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(words[pre])
    pipeline.decoder = decoders.ByteLevel()
    if words[pre] is qwen:
        pipeline.normalizer = normalizers.NFC()
    CONTROL, USER_DEFINED = 3, 4
    types = file.column("tokenizer.ggml.token_type", int, [1] * len(tokens))
    pairs = zip(tokens, types, strict=True)
    added = {token: kind == CONTROL for token, kind in pairs if kind in (CONTROL, USER_DEFINED)}
    for token, special in added.items():
        pipeline.add_tokens([tokenizers.AddedToken(token, special=special, normalized=False)])
    return TokenizersBackend(pipeline)


def _gguf_sentencepiece(file: GgufFile) -> Backend:
    """A sentencepiece model with the pieces, scores and types of the file."""
    module = "sentencepiece.sentencepiece_model_pb2"
    messages = file.package("protobuf", "has a sentencepiece tokenizer", module)
    model = messages.ModelProto()
    kinds = {"tokens": str, "scores": float, "token_type": int}
    columns = [file.column(f"tokenizer.ggml.{name}", kind) for name, kind in kinds.items()]
    for piece, score, token_type in zip(*columns, strict=True):
        model.pieces.add(piece=piece, score=score, type=token_type)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = messages.TrainerSpec.BPE, True
    trainer.unk_id = file.get("tokenizer.ggml.unknown_token_id", 0)
    trainer.bos_id = file.get("tokenizer.ggml.bos_token_id", 1)
    trainer.eos_id = file.get("tokenizer.ggml.eos_token_id", 2)
    trainer.pad_id = -1
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    normalizer.remove_extra_whitespaces, normalizer.escape_whitespaces = False, True
    return SentencePieceBackend(model.SerializeToString())
