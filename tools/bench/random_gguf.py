"""GGUF files with random weights in the shape of a named model, mixed as llama.cpp's Q4_K_M.

Speed, size and memory are those of real weights: as many blocks of Q4_K and Q6_K, scaled so that
activations stay in range, and a byte-level BPE with as many tokens and merges. Texts mean nothing.
"""

import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import pre_tokenizers

from minitri.core.config import ModelConfig
from minitri.core.errors import InputError
from minitri.core.log import log
from minitri.core.model.llama import Llama
from minitri.devices.folders import weights_folder
from minitri.files.checkpoint import placements
from minitri.files.named_models import MODELS

BLOCK = 256  # numbers of a block; a row of a matrix is a whole number of blocks


def random_gguf(name: str) -> Path:
    """The file of a named model's shape, written to the weights' folder once, or `InputError`."""
    target = weights_folder() / f"random-{name}.Q4_K_M.gguf"
    if not target.exists():
        log.info("writing %s", target)
        partial = target.with_suffix(".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        write_random(partial, MODELS[name].shape)
        partial.replace(target)
    return target


def write_random(path: Path, config: ModelConfig) -> None:
    """Writes the file, tensor by tensor. Raises `InputError`."""
    import gguf

    if config.hidden_size % BLOCK or config.intermediate_size % BLOCK:
        problem = f"{config.name} has rows that are no multiple of {BLOCK} numbers, as Q4_K needs"
        raise InputError(f"{problem}; choose another shape")
    family = "qwen3" if config.head_norm else "qwen2" if config.attention_bias else "llama"
    if family == "qwen2":  # the files that its makers give away have an LM head of their own
        config = dataclasses.replace(config, tie_word_embeddings=False)
    writer = gguf.GGUFWriter(path, family)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    add_shape(writer, config)
    add_tokens(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_layers)  # the most of all
    shapes = placements(Llama(config, dtype=torch.float32, device=torch.device("meta")))
    sizes = {}
    for name, tensor in shapes.items():
        kind = gguf.GGMLQuantizationType[kind_of(name, config)]
        sizes[name] = size = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        stem, _, part = name.rpartition(".")
        stored_name = f"{names.get_name(stem)}.{part}"
        writer.add_tensor_info(stored_name, size, np.dtype(np.uint8), math.prod(size), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for seed, (name, tensor) in enumerate(shapes.items()):
        data = np.full(tensor.shape, float("norm" in name), np.float32)
        if tensor.dim() == 2:
            data = random_blocks(sizes[name], tensor.shape[1], kind_of(name, config), seed)
        writer.write_tensor_data(data)
    writer.close()


def add_shape(writer: Any, config: ModelConfig) -> None:
    """Sizes and constants of a model, by the names of GGUF."""
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)


def kind_of(name: str, config: ModelConfig) -> str:
    """The number type of a tensor: more bits for the LM head and some values and MLPs."""
    if "norm" in name or name.endswith("bias"):
        return "F32"
    if "layers" not in name:
        is_head = name.startswith("lm_head") or config.tie_word_embeddings
        return "Q6_K" if is_head else "Q4_K"
    layer, eighth = int(re.findall(r"\d+", name)[0]), config.num_layers // 8
    is_better = not eighth <= layer < 7 * config.num_layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if is_better and re.search("v_proj|down_proj", name) else "Q4_K"


def random_blocks(shape: tuple[int, ...], num_columns: int, kind: str, seed: int) -> Any:
    """Blocks of bytes, of numbers with mean 0 that lengthen no vector much."""
    rows = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    blocks = rows.reshape(shape[0], num_columns // BLOCK, -1)
    unit = 0.7 / math.sqrt(num_columns)
    if kind == "Q4_K":  # units of the scales, and of what is subtracted: 7.5 times a scale
        blocks[..., :4] = np.array([unit / 258, 7.5 * unit / 258], "<f2").view(np.uint8)
    else:
        blocks[..., -2:] = np.array([unit / 1370], "<f2").view(np.uint8)
    return rows


def add_tokens(writer: Any, vocab_size: int) -> None:
    """Two control tokens, the bytes, and every merge of two, then of three of them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = itertools.product(letters, repeat=2)
    triples = ((a + b, c) for a, b, c in itertools.product(letters, repeat=3))
    merges = [*itertools.islice(itertools.chain(pairs, triples), vocab_size - len(letters) - 2)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<s>", "</s>", *letters, *map("".join, merges)])
    writer.add_token_types([3, 3, *[1] * (vocab_size - 2)])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
