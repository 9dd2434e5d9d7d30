"""A GGUF file: llama.cpp's container of weights, hyper-parameters and tokenizer in one.

`container.py` parses, the `gguf` package dequantizes, and `blocks.py` repacks what stays quantized.
This file translates names and conventions to those of Hugging Face, so that nobody else needs to
know them.
One trap: of a Llama, GGUF pairs neighbouring dimensions in the rotary embedding, so it stores the
rows of q and k in another order; they are put back here.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minitri.config import ModelConfig
from minitri.errors import InputError
from minitri.loading.gguf.blocks import BITS, repack
from minitri.loading.hf_config import (
    as_token_ids,
    explain,
    family,
    printable,
    read_fields,
    read_value,
)

if TYPE_CHECKING:
    from minitri.loading.gguf.container import StoredTensor

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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
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
_ROPE_KEYS = {
    "rope_theta": "freq_base",
    "original_max_position_embeddings": "scaling.original_context_length",
    "beta_fast": "scaling.yarn_beta_fast",
    "beta_slow": "scaling.yarn_beta_slow",
}
_ROPE_NEUTRAL = {"attn_factor": 1, "yarn_attn_factor": 1, "yarn_ext_factor": 1}
_ROPE_NEUTRAL |= {"yarn_log_multiplier": 0}
_ROPE_DIVISORS = "rope_freqs.weight"


class GgufFile:
    """An open GGUF file. Raises `InputError` for one that is damaged or is not a Llama."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self.needing("gguf"):
            from minitri.loading.gguf.container import read_container
        damages = (ValueError, KeyError, TypeError, ArithmeticError, OSError, MemoryError)
        with explain(f"{path} is not a whole GGUF file", *damages):
            self._metadata, self._tensors = read_container(path)
        self.architecture: str = self.get("general.architecture")
        self._own = family(self.architecture, path.name)

    generation_config: Mapping[str, Any] = MappingProxyType({})
    """Such a file recommends no way to sample."""

    def _error(self, problem: str) -> InputError:
        return InputError(f"{self.path.name} {problem}")

    def needing(self, package: str) -> AbstractContextManager[None]:
        """Turns the `ImportError` of an optional package into an `InputError`."""
        problem = f"{self.path.name} needs the package {package}"
        return explain(problem, ImportError, advice="run: pip install 'minitri[gguf]'", limit=90)

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata of a key: a number, a text, a boolean, a list of texts or an array."""
        return self._metadata.get(key, default)

    def _shape(self, key: str, default: Any = None) -> Any:
        """The metadata of one of the architecture's own keys."""
        return self.get(f"{self.architecture}.{key}", default)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean of the metadata. Raises `TypeError` for anything else."""
        return read_value(self._metadata, key, bool, default)

    def column(self, key: str, kind: type[Any], default: list[Any] | None = None) -> list[Any]:
        """A list of the metadata: of texts, whole numbers or numbers. Raises `TypeError`."""
        found = self.get(key, default)
        if isinstance(found, np.ndarray) and np.isfinite(found).all():
            found = found.tolist()
        if not isinstance(found, list) or not all(type(value) is kind for value in found):
            raise TypeError(f"{key} holds no values of the type {kind.__name__}")
        return found

    def reading(self, what: str) -> AbstractContextManager[None]:
        """Turns whatever goes wrong over damaged metadata into an `InputError`."""
        problem = f"{self.path.name}: {what} are damaged"
        return explain(problem, Exception, advice="get it again", limit=90, with_type=True)

    def config(self, name: str) -> ModelConfig:
        """The model's shape."""
        with self.reading("its hyper-parameters"):
            config = replace(
                read_fields(self._as_config_json(), name),
                output_bias="blk.0.attn_output.bias" in self._tensors,
                head_norm=self._own.get("head_norm", False),
            )
            if self._shape("rope.dimension_count", config.head_dim) != config.head_dim:
                raise self._error(
                    "rotates only a part of each head, which no Llama does; check the file"
                )
            if _ROPE_DIVISORS not in self._tensors:
                return config
            stored = self._tensors[_ROPE_DIVISORS]
            if stored.type.name != "F32" or stored.shape != (config.head_dim // 2,):
                raise self._error(
                    f"has RoPE divisors of type {stored.type.name} and shape {stored.shape} for a "
                    f"head of {config.head_dim}; get the file again"
                )
            divisors = tuple(stored.data.view("<f4").tolist())
            return replace(config, rope=replace(config.rope, frequency_divisors=divisors))

    def _as_config_json(self) -> dict[str, Any]:
        """The shape under the names of a Hugging Face config.json."""
        if self._shape("expert_count"):
            raise self._error("is a mixture of experts; minitri runs dense models only")
        if self._shape("attention.sliding_window"):
            raise self._error("has a sliding window, which minitri does not run; use another model")
        if "token_embd.weight" not in self._tensors:
            raise self._error("has no tensor token_embd.weight; get the complete file")
        found: dict[str, Any] = {}
        for name, key in _CONFIG_KEYS.items():
            found[name] = self._shape(key)
            if found[name] is None:
                key = f"{self.architecture}.{key}"
                raise self._error(f"has no {key}; get a GGUF file made by a current llama.cpp")
        eos = [as_token_ids(self.get(f"tokenizer.ggml.{name}_token_id")) for name in ("eos", "eot")]
        return found | {
            "num_key_value_heads": self._shape("attention.head_count_kv"),
            "head_dim": self._shape("attention.key_length"),
            "vocab_size": self._tensors["token_embd.weight"].shape[0],
            # A float32; the shortest decimal that rounds to it is what the author wrote.
            "rms_norm_eps": float(f"{found['rms_norm_eps']:.6g}"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": tuple(dict.fromkeys(eos[0] + eos[1])),
            "rope_parameters": self._rope(),
        }

    def _rope(self) -> dict[str, Any]:
        """The `rope_parameters` of a Hugging Face config.json."""
        for key, neutral in _ROPE_NEUTRAL.items():
            if self._shape(f"rope.scaling.{key}", neutral) != neutral:
                raise self._error(
                    f"sets rope.scaling.{key}, which minitri does not run; use another"
                )
        factor = self._shape("rope.scaling.factor", self._shape("rope.scale_linear", 1.0))
        kind = self._shape("rope.scaling.type", "default" if factor == 1 else "linear")
        found = {name: self._shape(f"rope.{key}") for name, key in _ROPE_KEYS.items()}
        return found | {"rope_type": "default" if kind == "none" else kind, "factor": factor}

    def quantized(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """Bits of the matrices whose numbers the CPU kernels can read, by name and shape."""
        return {
            (hugging_face_name(name), stored.shape): BITS[stored.type.name]
            for name, stored in self._tensors.items()
            if stored.type.name in BITS
        }

    def tensors(
        self, config: ModelConfig, *, packed: Collection[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, one at a time, dequantized to float32.

        Those that are named in `packed` stay quantized: rows of `cpu/quantized.py`.
        """
        for gguf_name, stored in self._tensors.items():
            if gguf_name == _ROPE_DIVISORS:
                continue
            name = hugging_face_name(gguf_name)
            if name in packed:
                weight = repack(stored.data, stored.type.name, stored.shape[-1])
            else:
                weight = self._dequantized(gguf_name, stored)
            for part, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
                fits = len(weight) % (2 * heads) == 0  # else it is of a wrong shape
                if self.architecture == "llama" and part in name and fits:
                    weight = _neighbours_to_halves(weight, heads)
            yield name, weight

    def _dequantized(self, name: str, stored: "StoredTensor") -> Tensor:
        from gguf import dequantize

        shown = f"tensor {printable(name, 60)} of type {stored.type.name}"
        problem = f"{self.path.name}: {shown} cannot be dequantized"
        advice = "use a file of another quantization"
        with explain(problem, NotImplementedError, ValueError, KeyError, advice=advice):
            values = dequantize(stored.data, stored.type)
        return torch.from_numpy(np.require(values, requirements="W"))  # no view of the file


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
