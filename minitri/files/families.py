"""Families of models: in what their configs and tensors differ from those of a Llama."""

from collections.abc import Mapping
from typing import Any

from minitri.core.config import ModelConfig

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"attention_bias": True, "output_bias": False},
    "qwen3": {"head_norm": True},
    "granite": {},
    "smollm3": {},
    "olmo2": {"norms_after": True, "joint_norm": True},
}
"""Architectures by the `model_type` of their config.json, and the fields that differ from Llama."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "granite": {"attention_multiplier": 1.0},
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2e6},
    "olmo2": {"rms_norm_eps": 1e-5},
}
"""Settings that a config.json may leave out, where Llama has another default."""
OUTPUT_NORMS = {"post_attention_layernorm": "attention_output_norm"}
OUTPUT_NORMS |= {"post_feedforward_layernorm": "mlp_output_norm"}
"""Norms after attention and MLP, as checkpoints and as a `Llama` call them."""


def family_fields(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig` that a family sets by itself. Wrong settings raise any error."""
    fields = FAMILIES[kind] | {"unrotated_layers": ()}
    if kind == "smollm3":
        layers = range(given["num_hidden_layers"])
        every = given.get("no_rope_layer_interval", 4)
        rotates = given.get("no_rope_layers", [(layer + 1) % every for layer in layers])
        fields["unrotated_layers"] = tuple(layer for layer in layers if not rotates[layer])
    return fields


def as_llama(name: str, config: ModelConfig) -> str:
    """The name that a Llama has for a tensor of Hugging Face."""
    names = OUTPUT_NORMS if config.norms_after else {}
    return ".".join(names.get(part, part) for part in name.split("."))
