"""A GGUF file: llama.cpp's container of weights, hyper-parameters and tokenizer in one.

The `gguf` package parses and dequantizes. This file translates names and conventions to those of
Hugging Face, so that nobody else needs to know them. One trap: GGUF pairs neighbouring dimensions
in its rotary embedding, so it stores the rows of q and k in another order; they are put back here.
"""

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitri.errors import InputError
from minitri.loading.damage import explain
from minitri.loading.hf_config import as_token_ids, read_fields
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
_CONFIG_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_ROPE_DIVISORS = "rope_freqs.weight"


class GgufFile:
    """An open GGUF file. Raises `InputError` for one that is damaged or is not a Llama."""

    def __init__(self, path: Path) -> None:
        self.path = path
        gguf = self.package("gguf", "is a GGUF file")
        damages = (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError)
        with explain(f"{path} is not a whole GGUF file", *damages):
            reader = gguf.GGUFReader(path)
            # The reader has an array for every string; plain values take a tenth of that memory.
            self._metadata = {key: stored.contents() for key, stored in reader.fields.items()}
            # Each has `data`, a view of the mapped file, and `shape` from the fastest dimension on.
            self._tensors = {stored.name: stored for stored in reader.tensors}
        kind = self.get("general.architecture")
        if kind != "llama":
            raise self._error(f"is a {kind!r} model; minitri runs the Llama architecture only")

    def _error(self, problem: str) -> InputError:
        return InputError(f"{self.path.name} {problem}")

    def package(self, name: str, needed_as: str, module: str | None = None) -> Any:
        """A module of an optional package. Raises `InputError` if it is not installed."""
        try:
            return importlib.import_module(module or name)
        except ImportError:
            raise self._error(
                f"{needed_as} and the package {name} is not installed; run: pip install "
                "'minitri[gguf]'"
            ) from None

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value of a key: a number, a string, a boolean or a list of them."""
        return self._metadata.get(key, default)

    def reading(self, what: str) -> AbstractContextManager[None]:
        """Turns whatever goes wrong over damaged metadata into an `InputError`."""
        problem, advice = f"{self.path.name}: {what} are damaged", "get the file again"
        return explain(problem, Exception, advice=advice, limit=90, with_type=True)

    def config(self, name: str) -> ModelConfig:
        """The model's shape."""
        with self.reading("its hyper-parameters"):
            config = read_fields(self._as_config_json(), name)
            return replace(config, rope=self._rope(config.context_length, config.head_dim))

    def _as_config_json(self) -> dict[str, Any]:
        """The shape under the names of a Hugging Face config.json."""
        if self.get("llama.expert_count"):
            raise self._error("is a mixture of experts; minitri runs dense Llama models only")
        if "token_embd.weight" not in self._tensors:
            raise self._error("has no tensor token_embd.weight; get the complete file")
        found: dict[str, Any] = {}
        for name, key in _CONFIG_KEYS.items():
            found[name] = self.get(f"llama.{key}")
            if found[name] is None:
                raise self._error(
                    f"has no llama.{key}; get a GGUF file made by a current llama.cpp"
                )
        eos = [as_token_ids(self.get(f"tokenizer.ggml.{name}_token_id")) for name in ("eos", "eot")]
        return found | {
            "num_key_value_heads": self.get("llama.attention.head_count_kv"),
            "head_dim": self.get("llama.attention.key_length"),
            "vocab_size": self._tensors["token_embd.weight"].shape[1],
            # A float32; the shortest decimal that rounds to it is what the author wrote.
            "rms_norm_eps": f"{found['rms_norm_eps']:.6g}",
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": tuple(dict.fromkeys(eos[0] + eos[1])),
        }

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
            divisors = tuple(map(float, self._tensors[_ROPE_DIVISORS].data))
            if len(divisors) != head_dim // 2:
                raise self._error(
                    f"has {len(divisors)} RoPE divisors for a head of {head_dim}; get the file "
                    "again"
                )
        factor = self.get("llama.rope.scaling.factor") or self.get("llama.rope.scale_linear") or 1.0
        kind = self.get("llama.rope.scaling.type") or ("default" if factor == 1 else "linear")
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
            kind, advice = stored.tensor_type.name, "use a file of another quantization"
            problem = f"{self.path.name}: tensor {gguf_name} of type {kind} cannot be dequantized"
            with explain(problem, NotImplementedError, ValueError, KeyError, advice=advice):
                values = dequantize(stored.data, stored.tensor_type)
            weight = torch.from_numpy(np.require(values, requirements="W"))  # no view of the file
            name = hugging_face_name(gguf_name)
            for part, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
                if part in name:
                    weight = _neighbours_to_halves(weight, heads)
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
