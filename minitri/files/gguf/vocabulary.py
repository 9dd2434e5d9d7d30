"""The tokenizer in a GGUF file, built for the library `tokenizers` or `sentencepiece`."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from minitri.core.errors import shorten
from minitri.text.tokenizer import Backend, SentencePieceBackend, TokenizersBackend

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CUTS: dict[Any, str | None] = {"gpt-2": None, "default": None, "smollm": None, None: None}
_CUTS |= {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN}
"""Patterns that cut a text into words before BPE, by `tokenizer.ggml.pre`; None: GPT-2's."""


def read_vocabulary(metadata: Mapping[str, Any]) -> Backend:
    """The tokenizer in the metadata of a GGUF file. Raises `ValueError` and others if unknown."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        return SentencePieceBackend(_sentencepiece_model(metadata))
    if kind == "gpt2":
        return TokenizersBackend(_byte_level_bpe(metadata))
    raise ValueError(f"it is of type {shorten(repr(kind), 60)}, neither gpt2 nor llama")


def _byte_level_bpe(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    pattern = _CUTS[pre]
    words: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        words.insert(0, pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    if pre == "smollm":
        words.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise ValueError("it has a token twice")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pattern is _LLAMA3)
    pipeline = tokenizers.Tokenizer(bpe)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(words)
    pipeline.decoder = decoders.ByteLevel()
    if pattern is _QWEN:
        pipeline.normalizer = normalizers.NFC()
    CONTROL, USER_DEFINED = 3, 4
    types = metadata["tokenizer.ggml.token_type"]
    added = [
        tokenizers.AddedToken(token, special=bool(kind == CONTROL), normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    pipeline.add_tokens(added)
    return pipeline


def _sentencepiece_model(metadata: Mapping[str, Any]) -> bytes:
    """A serialized sentencepiece model with the pieces, scores and types in a GGUF file."""
    from sentencepiece import sentencepiece_model_pb2 as messages  # needs the package protobuf

    parts = ("tokens", "scores", "token_type")
    pieces = zip(*(metadata[f"tokenizer.ggml.{part}"] for part in parts), strict=True)
    add_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    model = messages.ModelProto(
        pieces=[{"piece": piece, "score": score, "type": kind} for piece, score, kind in pieces],
        trainer_spec={"model_type": messages.TrainerSpec.BPE, "byte_fallback": True},
        normalizer_spec={"add_dummy_prefix": add_space, "remove_extra_whitespaces": False},
    )
    return bytes(model.SerializeToString())
