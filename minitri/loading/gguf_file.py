"""A GGUF file: llama.cpp's container of weights, hyper-parameters and tokenizer in one.

The `gguf` package parses and dequantizes; this file translates names and conventions to those of Hugging Face, so that
nobody else needs to know them. The one trap: GGUF pairs neighbouring dimensions in its rotary embedding, so the rows of
q and k are stored in another order and are put back here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minitri.model.config import ModelConfig, RopeConfig, as_token_ids
from minitri.errors import InputError, shorten

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"


class _StoredTensor(NamedTuple):
    name: str
    tensor_type: Any
    """Kind of quantization, as the package gguf numbers them."""
    data: Any
    """The raw blocks, a view of the mapped file."""
    shape: list[int]
    """Sizes from the fastest dimension to the slowest: (in, out) of a matrix."""


class GgufFile:
    """An open GGUF file. Raises `InputError` for one that is damaged or is not a Llama."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise InputError(
                f"{path.name} is a GGUF file and the package gguf is not installed; run: pip install 'minitri[gguf]'"
            ) from None
        self.path = path
        try:
            reader = GGUFReader(path)
            # The reader keeps an array for every string of the vocabulary; plain values take a tenth of that memory.
            self._metadata = {key: stored.contents() for key, stored in reader.fields.items()}
            self._tensors = [
                _StoredTensor(t.name, t.tensor_type, t.data, t.shape.tolist())
                for t in reader.tensors
            ]
        except (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError) as error:
            raise InputError(
                f"{path} is not a whole GGUF file ({shorten(error)}); download it again"
            ) from None
        architecture = self.get("general.architecture")
        if architecture != "llama":
            raise InputError(
                f"{path.name} is a {architecture!r} model; minitri runs the Llama architecture only"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value of a key: a number, a string, a boolean or a list of them."""
        return self._metadata.get(key, default)

    def config(self, name: str) -> ModelConfig:
        """The model's shape, as `ModelConfig.from_hf` gives it for a folder."""
        with self.reading("its hyper-parameters"):
            return self._config(name)

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Turns what goes wrong over metadata of the wrong kind into an `InputError`."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # metadata may hold anything
            raise InputError(
                f"{self.path.name}: {what} are damaged ({type(error).__name__}: {shorten(error, 90)}); "
                "get the file again"
            ) from None

    def _config(self, name: str) -> ModelConfig:
        tensors = {tensor.name: tensor for tensor in self._tensors}

        def need(key: str) -> Any:
            value = self.get(f"llama.{key}")
            if value is None:
                raise InputError(
                    f"{self.path.name} has no llama.{key}; get a GGUF file made by a current llama.cpp"
                )
            return value

        if self.get("llama.expert_count"):
            raise InputError(
                f"{self.path.name} is a mixture of experts; minitri runs dense Llama models only"
            )
        if "token_embd.weight" not in tensors:
            raise InputError(
                f"{self.path.name} has no tensor token_embd.weight; get the complete file"
            )
        num_heads, hidden_size = int(need("attention.head_count")), int(need("embedding_length"))
        head_dim = int(self.get("llama.attention.key_length") or hidden_size // num_heads)
        if int(self.get("llama.rope.dimension_count") or head_dim) != head_dim:
            raise InputError(
                f"{self.path.name} rotates only a part of each head, which no Llama does; check the file"
            )
        eos = [as_token_ids(self.get(f"tokenizer.ggml.{name}_token_id")) for name in ("eos", "eot")]
        bos = as_token_ids(self.get("tokenizer.ggml.bos_token_id"))
        return ModelConfig(
            num_layers=int(need("block_count")),
            hidden_size=hidden_size,
            intermediate_size=int(need("feed_forward_length")),
            num_heads=num_heads,
            num_kv_heads=int(self.get("llama.attention.head_count_kv") or num_heads),
            head_dim=head_dim,
            vocab_size=int(tensors["token_embd.weight"].shape[1]),
            context_length=int(need("context_length")),
            rope=self._rope(tensors.get(_ROPE_DIVISORS), int(need("context_length")), head_dim),
            # Stored as float32; the shortest decimal that gives the same float32 is what the author wrote.
            rms_norm_eps=float(f"{need('attention.layer_norm_rms_epsilon'):.6g}"),
            tie_word_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos[0] + eos[1])),
            name=name,
        )

    def _rope(self, divisors: _StoredTensor | None, context: int, head_dim: int) -> RopeConfig:
        factor = self.get("llama.rope.scaling.factor") or self.get("llama.rope.scale_linear") or 1.0
        kind = self.get("llama.rope.scaling.type") or ("none" if factor == 1 else "linear")
        if (self.get("llama.rope.scaling.attn_factor") or 1) != 1:
            raise InputError(
                f"{self.path.name} sets rope.scaling.attn_factor, which minitri does not run; use another"
            )
        frequency_divisors = None
        if divisors is not None:
            frequency_divisors = tuple(float(value) for value in divisors.data)
            if len(frequency_divisors) != head_dim // 2:
                raise InputError(
                    f"{self.path.name} has {len(frequency_divisors)} RoPE divisors for a head of {head_dim}; "
                    "get the file again"
                )
        return RopeConfig(
            theta=float(self.get("llama.rope.freq_base") or 10000.0),
            kind="default" if kind == "none" else kind,
            factor=float(factor),
            original_context=int(self.get("llama.rope.scaling.original_context_length") or context),
            frequency_divisors=frequency_divisors,
        )

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, dequantized to float32, one at a time."""
        from gguf import dequantize

        for stored in self._tensors:
            if stored.name == _ROPE_DIVISORS:
                continue
            try:
                values = dequantize(stored.data, stored.tensor_type)
                weight = torch.from_numpy(
                    np.require(values, requirements="W")
                )  # copies what still is the file
            except (NotImplementedError, ValueError, KeyError) as error:
                raise InputError(
                    f"{self.path.name}: tensor {stored.name} of type {stored.tensor_type.name} cannot be dequantized "
                    f"({shorten(error)}); use a file of another quantization"
                ) from None
            name = hugging_face_name(stored.name)
            if name.endswith(("q_proj.weight", "q_proj.bias")):
                weight = _neighbours_to_halves(weight, config.num_heads)
            elif name.endswith(("k_proj.weight", "k_proj.bias")):
                weight = _neighbours_to_halves(weight, config.num_kv_heads)
            yield name, weight


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`; names that mean nothing to us stay."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def _neighbours_to_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from pairs (0, 1), (2, 3), ... to pairs (i, i + D/2), the order `Rotary.rotate` wants."""
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
