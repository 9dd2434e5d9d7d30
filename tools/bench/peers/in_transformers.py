"""The peer `transformers` in this process: the engine's weights in the engine's dtype. Only this
file knows it, and only on demand."""

import inspect
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minitri.core.config import ModelConfig
from minitri.engine import Engine
from minitri.files.checkpoint import open_checkpoint
from tools.bench.peers import StartPeer


def transformers_model(path: Path, engine: Engine) -> Any:
    """The engine's weights in `transformers`."""
    from transformers import AutoModelForCausalLM

    dtype = engine.model.dtype
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(transformers_config(engine.config)))
        tensors = open_checkpoint(path).tensors(engine.config)
        weights = {name: tensor.to(dtype) for name, tensor in tensors}
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(engine.model.device).eval()


def transformers_config(config: ModelConfig) -> dict[str, Any]:
    """A model's shape in the words of `transformers`, RoPE scaling included."""
    rope = config.rope
    scaling = {
        "rope_type": rope.kind,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_context,
    }
    names = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "truncate", "attention_factor"),
    }.get(rope.kind, ())
    scaling |= {name: getattr(rope, name) for name in names if getattr(rope, name) is not None}
    is_qwen2 = config.attention_bias and config.output_bias is False
    kind = "Qwen3" if config.head_norm else "Qwen2" if is_qwen2 else "Llama"
    return {
        "model_type": kind.lower(),
        "architectures": [f"{kind}ForCausalLM"],
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
    }


def transformers_peer(model: Any) -> StartPeer:
    """Plain decoding by its forward pass and its cache, without the overhead of its `generate`."""
    from transformers import DynamicCache

    # Since 5.24 it is `cache`.
    names = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"

    def run(prompt: list[int], num_new: int) -> Iterator[int]:
        cache, block = DynamicCache(config=model.config), prompt
        options = {name: cache, "use_cache": True, "logits_to_keep": 1}
        for _ in range(num_new):
            with torch.inference_mode():
                logits = model(torch.tensor([block], device=model.device), **options).logits
            block = [int(logits[0, -1].argmax())]
            yield block[0]

    return run
