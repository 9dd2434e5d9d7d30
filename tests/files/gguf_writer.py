"""GGUF files for tests, as llama.cpp's converter writes them: neighbouring rotary pairs."""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import tokenizers
import torch

from minitri.core.config import ModelConfig
from tests.conftest import SENTENCES
from tools.bench.random_gguf import add_shape

ARCHITECTURES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
PAIRED = ("llama", "granite", "smollm3")  # with neighbouring rotary pairs


def quantized(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows of blocks; those of K-quants hold any numbers, of about the size of 0.05."""
    if not kind.name.endswith("_K"):
        return gguf.quantize(values, kind)
    num_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    random = np.random.default_rng(values.size)
    shape = (len(values), values.shape[1] // 256)
    blocks = random.integers(0, 256, (*shape, num_bytes), np.uint8)
    units = {"Q4_K": (2e-4, 1.5e-3), "Q5_K": (1e-4, 1.6e-3), "Q6_K": (4e-5,)}[kind.name]
    numbers = (units * random.uniform(0.5, 1.5, (*shape, len(units)))).astype("<f2").view(np.uint8)
    place = slice(-2, None) if kind.name == "Q6_K" else slice(4)
    blocks[..., place] = numbers
    return blocks.reshape(len(values), -1)


def pieces(path: Path, **options: object) -> Path:
    """A tokenizer.model with Llama 2's options."""
    kept = {"byte_fallback": True, "remove_extra_whitespaces": False, "minloglevel": 2}
    kept |= {"normalization_rule_name": "identity", "vocab_size": 400, "hard_vocab_limit": False}
    train = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=iter(SENTENCES * 5), model_prefix=str(path), **kept | options)
    return path.with_suffix(".model")


def _add_words(writer: gguf.GGUFWriter, pipeline: tokenizers.Tokenizer, pre: str) -> None:
    content = json.loads(pipeline.to_str())
    vocab = pipeline.get_vocab(with_added_tokens=True)
    kinds = {token["content"]: 3 if token["special"] else 4 for token in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, 1) for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_add_bos_token(False)


def _add_pieces(writer: gguf.GGUFWriter, model: Path) -> None:
    pieces = sentencepiece.SentencePieceProcessor(str(model))
    ids = range(pieces.vocab_size())
    writer.add_tokenizer_model("llama")
    writer.add_token_list([pieces.id_to_piece(i) for i in ids])
    writer.add_token_scores([pieces.get_score(i) for i in ids])
    kinds = {2: pieces.is_unknown, 3: pieces.is_control, 6: pieces.is_byte}
    types = [next((kind for kind, it_is in kinds.items() if it_is(i)), 1) for i in ids]
    writer.add_token_types(types)


def write_gguf(
    path: Path,
    config: ModelConfig,
    words: tokenizers.Tokenizer | Path,
    weights: dict[str, torch.Tensor] | None = None,
    kind: str = "F32",
    changes: Mapping[str, object] | None = None,
    pre: str = "gpt-2",
    architecture: str = "llama",
    max_tensors: int = 0,
    **kinds: str,
) -> Path:
    """A file with a byte-level BPE that cuts words in the way `pre`, or with the pieces of a
    sentencepiece model, and `changes` of metadata and tensors. `weights` are under Hugging Face
    names; without them there is only an embedding. `kinds` of parts such as `v_proj` may differ.
    With `max_tensors` there are several files, as llama.cpp splits them."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=max_tensors)
    add_shape(writer, config)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if isinstance(words, Path):
        _add_pieces(writer, words)
    else:
        _add_words(writer, words, pre)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[bool] = writer.add_bool
    add[list] = writer.add_array
    add[np.ndarray] = writer.add_tensor
    for key, value in (changes or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            add[type(value)](key, value)
    if weights is None:
        weights = {"model.embed_tokens.weight": torch.zeros(config.vocab_size, config.hidden_size)}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], 8)
    for name, tensor in weights.items():
        values = tensor.float().numpy()
        part = name.split(".")[-2]
        if architecture == "gemma3" and "norm" in part:
            values = values + 1
        if architecture in PAIRED and part in heads:
            halves = values.reshape(heads[part], 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        stored_as = gguf.GGMLQuantizationType[kinds.get(part, kind) if values.ndim == 2 else "F32"]
        stem, ending = name.rsplit(".", 1)
        stored = quantized(values, stored_as)
        writer.add_tensor(f"{names.get_name(stem)}.{ending}", stored, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
