"""A GGUF file: llama.cpp's container of weights, hyper-parameters and tokenizer in one.

Names and conventions become those of Hugging Face here. One trap: GGUF pairs neighbouring
dimensions in the rotary embedding of a Llama, so the rows of its q and k stand in another order.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitri.core.config import ModelConfig
from minitri.core.errors import explain, shorten
from minitri.devices.cpu.kernels import Kernels
from minitri.devices.cpu.quantized import Form, packed_shape
from minitri.files.gguf.blocks import FORMS, keeps_zeros, repack
from minitri.files.gguf.vocabulary import read_vocabulary
from minitri.files.hf_config import read_config, require
from minitri.text.tokenizer import Backend

_NAMES = """
blk          model.layers
token_embd   model.embed_tokens
output_norm  model.norm
output       lm_head
attn_norm    input_layernorm
attn_q       self_attn.q_proj
attn_k       self_attn.k_proj
attn_v       self_attn.v_proj
attn_output  self_attn.o_proj
attn_q_norm  self_attn.q_norm
attn_k_norm  self_attn.k_norm
ffn_norm     post_attention_layernorm
ffn_gate     mlp.gate_proj
ffn_up       mlp.up_proj
ffn_down     mlp.down_proj
"""
_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
}
_ROPE_KEYS = {
    "rope_theta": "rope.freq_base",
    "rope_type": "rope.scaling.type",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_RUNS = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "rope.scale_linear": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
}
_ROPE_DIVISORS = "rope_freqs.weight"


class GgufFile:
    """An open GGUF file. Raises `InputError` for one that is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain(f"{path.name} needs the package gguf", "run: pip install 'minitri[gguf]'"):
            from minitri.files.gguf.container import read_container
        with explain(f"{path.name} is not a whole GGUF file"):
            self.metadata, stored = read_container(path)
        names = dict(line.split() for line in _NAMES.strip().splitlines())
        self._tensors = {
            ".".join(names.get(part, part) for part in name.split(".")): tensor
            for name, tensor in stored.items()
        }
        self.generation_config: dict[str, Any] = {}  # such a file recommends no way to sample
        self._architecture = self.metadata.get("general.architecture")
        self.tokenizer_config = {
            "chat_template": self.metadata.get("tokenizer.chat_template"),
            "add_bos_token": self.metadata.get("tokenizer.ggml.add_bos_token"),
        }

    def tokenizer(self) -> Backend:
        return read_vocabulary(self.metadata)

    def config(self, name: str) -> ModelConfig:
        """The model's shape. Raises `InputError` for a model of another family."""
        with explain(f"{self.path.name} has damaged hyper-parameters"):
            start = f"{self._architecture}."
            settings = {key.removeprefix(start): it for key, it in self.metadata.items()}
            if "rope.scaling.factor" in settings:
                settings.setdefault("rope.scaling.type", "linear")
            ends = [settings.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")]
            first = "model.layers.0.self_attn"
            config = read_config(
                {
                    **{name: settings.get(key) for name, key in _KEYS.items()},
                    "model_type": self._architecture,
                    "vocab_size": self._tensors["model.embed_tokens.weight"].shape[0],
                    "tie_word_embeddings": "lm_head.weight" not in self._tensors,
                    "attention_bias": f"{first}.q_proj.bias" in self._tensors,
                    "output_bias": f"{first}.o_proj.bias" in self._tensors,
                    "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
                    "rope_parameters": {name: settings.get(it) for name, it in _ROPE_KEYS.items()},
                },
                name,
            )
            require(settings, _RUNS | {"rope.dimension_count": config.head_dim}, self.path.name)
            rope = config.rope
            if stored := self._tensors.get(_ROPE_DIVISORS):
                if (stored.type.name, stored.shape) != ("F32", (config.head_dim // 2,)):
                    raise ValueError(f"RoPE divisors of {stored.type.name} {stored.shape}")
                rope = replace(rope, frequency_divisors=tuple(stored.data.view("<f4").tolist()))
            # A float32; the shortest decimal that rounds to it is what the author wrote.
            return replace(config, rope=rope, rms_norm_eps=float(f"{config.rms_norm_eps:.6g}"))

    def quantized(self) -> dict[tuple[str, tuple[int, ...]], Form]:
        """The forms of the matrices whose numbers the CPU kernels can read, by name and shape."""
        return {
            (name, stored.shape): FORMS[stored.type.name]
            for name, stored in self._tensors.items()
            if stored.type.name in FORMS and len(stored.shape) == 2
        }

    def is_in_few_bits(self) -> bool:
        """Whether the CPU kernels can read all matrices as they are, in 4 to 6 bits, or 8 those of
        the vocabulary."""
        return all(
            FORMS.get(stored.type.name, Form.PLAIN).bits <= (6 if ".layers." in name else 8)
            for name, stored in self._tensors.items()
            if len(stored.shape) == 2
        )

    def num_weights(self) -> int:
        return sum(math.prod(stored.shape) for stored in self._tensors.values())

    def num_bytes(self) -> int:
        return sum(stored.data.nbytes for stored in self._tensors.values())

    def tensors(
        self,
        config: ModelConfig,
        packed: Mapping[str, Tensor] = MappingProxyType({}),
        kernels: Kernels | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its Hugging Face name, one at a time, dequantized to float32, which
        kernels do sooner; those that have a place in `packed` stay quantized, and are put there as
        `devices/cpu/quantized.py` says."""
        import gguf

        for name, stored in self._tensors.items():
            if name == _ROPE_DIVISORS:
                continue
            with explain(f"{self.path.name} has a tensor {shorten(name, 60)} that is not read"):
                form = FORMS.get(stored.type.name)
                order = self._order(name, stored.shape[0], config)
                if name in packed:
                    weight = packed[name]
                    repack(stored, weight, order.argsort() if order is not None else None)
                elif kernels is not None and form and keeps_zeros(stored):
                    N, E = stored.shape
                    packed_NX = torch.empty(packed_shape(N, E, form), dtype=torch.uint8)
                    repack(stored, packed_NX)
                    weight = kernels.dequantize(packed_NX, E, form, torch.float32)[:N]
                else:
                    values = gguf.dequantize(stored.data, stored.type)
                    weight = torch.from_numpy(np.require(values, requirements="W"))  # no view
                if order is not None and weight.is_floating_point():
                    weight = weight[order.argsort()]
            yield name, weight

    def _order(self, name: str, num_rows: int, config: ModelConfig) -> Tensor | None:
        """Where the rows of a tensor belong, if not where they stand: those of q and k, pairs (0,
        1), (2, 3), ... of each head, go to (i, i + D/2)."""
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        part = name.split(".")[-2]
        if self._architecture != "llama" or part not in heads:
            return None
        return torch.arange(num_rows).view(heads[part], 2, -1).transpose(1, 2).flatten()
