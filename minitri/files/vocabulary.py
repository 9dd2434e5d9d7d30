"""Vocabularies of sentencepiece and GGUF, as tokenizers of the package `tokenizers`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from minitri.core.errors import InputError, shorten
from minitri.core.log import log
from minitri.text.special_tokens import END_MARKS

NORMAL, UNKNOWN, USER_DEFINED = 1, 2, 4  # types of pieces
CONTROL = (UNKNOWN, 3)  # types of pieces that are control tokens
_ROWS = Path(__file__).with_name("words.txt").read_text("utf-8").splitlines()
_CUTS = {name: row.split("\t")[1:] for row in _ROWS for name in row.split("\t")[0].split()}
"""Patterns that cut a text into words before BPE, one after another, by `tokenizer.ggml.pre`."""
WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
"""Values of `tokenizer.ggml.pre` that put BOS in front, and keep a word that is a token whole."""


def read_vocabulary(metadata: Mapping[str, Any], name: str) -> tokenizers.Tokenizer:
    """The tokenizer in a GGUF file's metadata; `name`: the file's. Raises for an unknown kind."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("llama", "gpt2"):
        raise ValueError(f"it is of type {shorten(repr(kind), 60)}, neither gpt2 nor llama")
    tokens = metadata["tokenizer.ggml.tokens"]
    if len({*tokens}) < len(tokens):
        raise ValueError("it has a token twice")
    types = [*map(int, metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens)))]
    if kind == "llama":
        space = "always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
        scores = map(float, metadata["tokenizer.ggml.scores"])
        pipeline = piece_pipeline([*zip(tokens, scores, types, strict=True)], space)
    else:
        pipeline = _byte_level_bpe(metadata, name)
    pairs = [*zip(tokens, types, strict=True)]
    shown = [AddedToken(token, normalized=False) for token, kind in pairs if kind == USER_DEFINED]
    pipeline.add_tokens(shown)
    marks = {*END_MARKS, "</s>"}  # control tokens of any type, as for llama.cpp
    pipeline.add_special_tokens([text for text, kind in pairs if kind in CONTROL or text in marks])
    return pipeline


def _byte_level_bpe(metadata: Mapping[str, Any], name: str) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if "tokenizer.ggml.pre" not in metadata:
        log.warning("%s does not say how words are cut (tokenizer.ggml.pre); get a newer one", name)
    if pre not in _CUTS:
        raise InputError(f"{name} has tokenizer.ggml.pre={pre!r:.60}; use {' or '.join(_CUTS)}")
    vocab = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    pipeline = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in WITH_BOS))
    words = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _CUTS[pre]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([*words, letters])
    pipeline.decoder = decoders.ByteLevel()
    if _CUTS[pre] == _CUTS["qwen2"]:  # as Qwen's own tokenizers do, unlike llama.cpp
        pipeline.normalizer = normalizers.NFC()
    return pipeline


def read_model(data: bytes, space: str) -> tokenizers.Tokenizer:
    """Makes a tokenizer of a tokenizer.model, `data`. `space` is where it adds one: before a text
    ("first"), also after control tokens ("always"), or "never". Raises `ValueError`."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # slow

    model = ModelProto.FromString(data)
    kind, spec = model.trainer_spec.model_type, model.normalizer_spec
    if kind not in (1, 2):  # unigram, BPE
        raise ValueError("it is neither of BPE nor a unigram model")
    pieces = [(piece.piece, piece.score, piece.type) for piece in model.pieces]
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        ends, runs = map(Regex, (r"\A +| +\z", " +"))
        steps += [normalizers.Replace(ends, ""), normalizers.Replace(runs, " ")]
    space = space if spec.add_dummy_prefix else "never"
    pipeline = piece_pipeline(pieces, space, *steps, is_unigram=kind == 1)
    pipeline.add_special_tokens([text for text, _, kind in pieces if kind in CONTROL])
    return pipeline


def piece_pipeline(
    pieces: Sequence[tuple[str, float, int]], space: str, *steps: Any, is_unigram: bool = False
) -> tokenizers.Tokenizer:
    """A BPE or unigram tokenizer of pieces (text, score, type), which normalizes by `steps` first.
    A space is put in front of a text and of what follows control tokens (`space` "always"), of
    the text alone ("first"), or "never"."""
    vocab = {piece: number for number, (piece, _, _) in enumerate(pieces)}
    unknown = next((piece for piece, _, kind in pieces if kind == UNKNOWN), None)
    whole = [piece for piece, _, kind in pieces if kind == USER_DEFINED]
    has_bytes = "<0x00>" in vocab
    if is_unigram:
        scores = [(piece, score) for piece, score, _ in pieces]
        model: Any = models.Unigram(scores, vocab.get(unknown or ""), has_bytes)
    else:  # the pair is merged first that makes the piece of highest score, of equal ones the first
        ranks = {piece: -score for piece, score, kind in pieces if kind == NORMAL}
        merges = [
            (piece[:cut], piece[cut:])
            for piece in sorted(ranks, key=ranks.__getitem__)
            for cut in range(1, len(piece))
            if piece[:cut] in ranks and piece[cut:] in ranks
        ]
        model = models.BPE(
            vocab,
            merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
            ignore_merges=bool(whole),
        )
    pipeline = tokenizers.Tokenizer(model)
    front = [normalizers.Prepend("▁")] * (space == "always")
    pipeline.normalizer = normalizers.Sequence([*steps, *front, normalizers.Replace(" ", "▁")])
    first = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    texts = "|".join(map(re.escape, sorted(whole, key=len, reverse=True)))
    alone = pre_tokenizers.Split(Regex(texts), "isolated")
    cuts = [first] * (space == "first") + [alone] * bool(whole)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    spelling: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    spelling += [decoders.Strip(" ", 1, 0)] * (space != "never")
    pipeline.decoder = decoders.Sequence(spelling)
    return pipeline
