"""GGUF files for tests, as llama.cpp's converter writes them: neighbouring rotary pairs."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import tokenizers
import torch

from minitri.core.config import ModelConfig

NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 8)  # the most of all families


def stored_name(name: str) -> str:
    """Name in GGUF of a tensor of Hugging Face."""
    stem, kind = name.rsplit(".", 1)
    return f"{NAMES.get_name(stem)}.{kind}"


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


def _header(path: Path, config: ModelConfig, architecture: str = "llama") -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return writer


def _finish(
    writer: gguf.GGUFWriter, config: ModelConfig, weights: dict[str, torch.Tensor] | None, kind: str
) -> None:
    if weights is None:
        weights = {"model.embed_tokens.weight": torch.zeros(config.vocab_size, config.hidden_size)}
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    for name, tensor in weights.items():
        values = tensor.float().numpy()
        part = name.split(".")[-2]
        if writer.arch == "llama" and part in heads:
            halves = values.reshape(heads[part], 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        quantization = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        stored = quantized(values, quantization)
        writer.add_tensor(stored_name(name), stored, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    config: ModelConfig,
    pipeline: tokenizers.Tokenizer,
    weights: dict[str, torch.Tensor] | None = None,
    kind: str = "F32",
    add: Callable[[gguf.GGUFWriter], object] | None = None,
    pre: str = "gpt-2",
    architecture: str = "llama",
) -> Path:
    """A file with a byte-level BPE that cuts words in the way `pre`, and what `add` puts into the
    writer. `weights` are under Hugging Face names; without them there is only an embedding."""
    content = json.loads(pipeline.to_str())
    vocab = pipeline.get_vocab(with_added_tokens=True)
    special = {token["content"] for token in content["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer = _header(path, config, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_add_bos_token(False)
    if add is not None:
        add(writer)
    _finish(writer, config, weights, kind)
    return path


def write_gguf_with_sentencepiece(path: Path, config: ModelConfig, model: Path) -> Path:
    """A file with the pieces of a sentencepiece model and no weights but an embedding."""
    pieces = sentencepiece.SentencePieceProcessor(str(model))
    ids = range(pieces.vocab_size())
    writer = _header(path, config)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([pieces.id_to_piece(i) for i in ids])
    writer.add_token_scores([pieces.get_score(i) for i in ids])
    kinds = {2: pieces.is_unknown, 3: pieces.is_control, 6: pieces.is_byte}
    types = [next((kind for kind, it_is in kinds.items() if it_is(i)), 1) for i in ids]
    writer.add_token_types(types)
    _finish(writer, config, None, "F32")
    return path
