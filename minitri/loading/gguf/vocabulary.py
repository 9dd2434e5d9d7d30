"""The tokenizer in a GGUF file, as one of the libraries takes it."""

from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from minitri.errors import InputError, shorten
from minitri.loading.gguf.file import GgufFile

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_level_bpe(file: GgufFile) -> tokenizers.Tokenizer:
    """Byte-level BPE; `tokenizer.ggml.pre` names how a text is cut into words first."""
    gpt2: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    smollm = [pre_tokenizers.Digits(individual_digits=True), *gpt2]
    llama3, qwen = (
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        for pattern in (_LLAMA3, _QWEN)
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
    return pipeline


def sentencepiece_model(file: GgufFile) -> bytes:
    """A sentencepiece model with the pieces, scores and types of the file."""
    with file.needing("protobuf"):
        from sentencepiece import sentencepiece_model_pb2 as messages
    model = messages.ModelProto()
    kinds = {"tokens": str, "scores": float, "token_type": int}
    columns = [file.column(f"tokenizer.ggml.{name}", kind) for name, kind in kinds.items()]
    for piece, score, token_type in zip(*columns, strict=True):
        model.pieces.add(piece=piece, score=score, type=token_type)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type = messages.TrainerSpec.BPE
    trainer.byte_fallback = True
    trainer.unk_id = file.get("tokenizer.ggml.unknown_token_id", 0)
    trainer.bos_id = file.get("tokenizer.ggml.bos_token_id", 1)
    trainer.eos_id = file.get("tokenizer.ggml.eos_token_id", 2)
    trainer.pad_id = -1
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    return bytes(model.SerializeToString())
