"""A GGUF file: llama.cpp's container of weights, hyper-parameters and tokenizer in one.

The `gguf` package parses and dequantizes. This file translates names and conventions to those of
Hugging Face, so that nobody else needs to know them. One trap: GGUF pairs neighbouring dimensions
in its rotary embedding, so it stores the rows of q and k in another order; they are put back here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitri.errors import InputError, shorten
from minitri.loading.hf_config import as_token_ids
from minitri.model.config import ModelConfig, RopeConfig

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


class GgufFile:
    """An open GGUF file. Raises `InputError` for one that is damaged or is not a Llama."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise InputError(
                f"{path.name} is a GGUF file and the package gguf is not installed; run: pip "
                "install 'minitri[gguf]'"
            ) from None
        self.path = path
        try:
            reader = GGUFReader(path)
            # The reader has an array for every string; plain values take a tenth of that memory.
            self._metadata = {key: stored.contents() for key, stored in reader.fields.items()}
            # Each has `data`, a view of the mapped file, and `shape` from the fastest dimension on.
            self._tensors = {stored.name: stored for stored in reader.tensors}
        except (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError) as error:
            raise InputError(
                f"{path} is not a whole GGUF file ({shorten(error)}); download it again"
            ) from None
        architecture = self.get("general.architecture")
        if architecture != "llama":
            raise self._error(
                f"is a {architecture!r} model; minitri runs the Llama architecture only"
            )

    def _error(self, problem: str) -> InputError:
        return InputError(f"{self.path.name} {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value of a key: a number, a string, a boolean or a list of them."""
        return self._metadata.get(key, default)

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Turns whatever goes wrong over damaged metadata into an `InputError`."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # metadata may hold anything
            raise InputError(
                f"{self.path.name}: {what} are damaged ({type(error).__name__}: "
                f"{shorten(error, 90)}); get the file again"
            ) from None

    def config(self, name: str) -> ModelConfig:
        """The model's shape."""
        with self.reading("its hyper-parameters"):
            return self._config(name)

    def _config(self, name: str) -> ModelConfig:
        def need(key: str) -> Any:
            if (value := self.get(f"llama.{key}")) is None:
                raise self._error(
                    f"has no llama.{key}; get a GGUF file made by a current llama.cpp"
                )
            return value

        if self.get("llama.expert_count"):
            raise self._error("is a mixture of experts; minitri runs dense Llama models only")
        if "token_embd.weight" not in self._tensors:
            raise self._error("has no tensor token_embd.weight; get the complete file")
        num_heads, hidden_size = int(need("attention.head_count")), int(need("embedding_length"))
        head_dim = int(self.get("llama.attention.key_length") or hidden_size // num_heads)
        context = int(need("context_length"))
        eos = [as_token_ids(self.get(f"tokenizer.ggml.{name}_token_id")) for name in ("eos", "eot")]
        bos = as_token_ids(self.get("tokenizer.ggml.bos_token_id"))
        return ModelConfig(
            num_layers=int(need("block_count")),
            hidden_size=hidden_size,
            intermediate_size=int(need("feed_forward_length")),
            num_heads=num_heads,
            num_kv_heads=int(self.get("llama.attention.head_count_kv") or num_heads),
            head_dim=head_dim,
            vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
            context_length=context,
            rope=self._rope(context, head_dim),
            # A float32; the shortest decimal that rounds to it is what the author wrote.
            rms_norm_eps=float(f"{need('attention.layer_norm_rms_epsilon'):.6g}"),
            tie_word_embeddings="output.weight" not in self._tensors,
            attention_bias="blk.0.attn_q.bias" in self._tensors,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos[0] + eos[1])),
            name=name,
        )

    def _rope(self, context: int, head_dim: int) -> RopeConfig:
        if int(self.get("llama.rope.dimension_count") or head_dim) != head_dim:
            raise self._error(
                "rotates only a part of each head, which no Llama does; check the file"
            )
        if (self.get("llama.rope.scaling.attn_factor") or 1) != 1:
            raise self._error(
                "sets rope.scaling.attn_factor, which minitri does not run; use another"
            )
        divisors = None
        if _ROPE_DIVISORS in self._tensors:
            divisors = tuple(float(value) for value in self._tensors[_ROPE_DIVISORS].data)
            if len(divisors) != head_dim // 2:
                raise self._error(
                    f"has {len(divisors)} RoPE divisors for a head of {head_dim}; get the file "
                    "again"
                )
        factor = self.get("llama.rope.scaling.factor") or self.get("llama.rope.scale_linear") or 1.0
        kind = self.get("llama.rope.scaling.type") or ("none" if factor == 1 else "linear")
        return RopeConfig(
            theta=float(self.get("llama.rope.freq_base") or RopeConfig.theta),
            kind="default" if kind == "none" else kind,
            factor=float(factor),
            original_context=int(self.get("llama.rope.scaling.original_context_length") or context),
            frequency_divisors=divisors,
        )

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, dequantized to float32, one at a time."""
        from gguf import dequantize

        for gguf_name, stored in self._tensors.items():
            if gguf_name == _ROPE_DIVISORS:
                continue
            try:
                values = dequantize(stored.data, stored.tensor_type)
            except (NotImplementedError, ValueError, KeyError) as error:
                raise InputError(
                    f"{self.path.name}: tensor {gguf_name} of type {stored.tensor_type.name} "
                    f"cannot be dequantized ({shorten(error)}); use a file of another quantization"
                ) from None
            weight = torch.from_numpy(np.require(values, requirements="W"))  # no view of the file
            name = hugging_face_name(gguf_name)
            if name.endswith(("q_proj.weight", "q_proj.bias")):
                weight = _neighbours_to_halves(weight, config.num_heads)
            elif name.endswith(("k_proj.weight", "k_proj.bias")):
                weight = _neighbours_to_halves(weight, config.num_kv_heads)
            yield name, weight


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name


def _neighbours_to_halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from pairs (0, 1), (2, 3), ... to (i, i + D/2), as `Rotary` wants them."""
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
