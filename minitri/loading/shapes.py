"""Shapes of the named models, for what must be known before any file is read: `minitri.plan`, and weights made up for
`bench --load dummy`. A model that really runs is described by the config beside its weights, never by this table."""

from __future__ import annotations

from minitri.model.config import MODELS, ModelConfig

_LLAMA2_7B = (32, 4096, 11008, 32, 32, 128, 32000, False)
_SHAPES: dict[str, tuple[int, int, int, int, int, int, int, bool]] = {
    # layers, hidden, intermediate, heads, KV heads, head dim, vocabulary, tied embeddings
    "llama2-7b-128k": _LLAMA2_7B,
    "llama2-13b-128k": (40, 5120, 13824, 40, 40, 128, 32000, False),
    "lwm-text-128k": _LLAMA2_7B,
    "lwm-text-256k": _LLAMA2_7B,
    "lwm-text-512k": _LLAMA2_7B,
    "lwm-text-1m": _LLAMA2_7B,
    "lwm-text-chat-128k": _LLAMA2_7B,
    "llama-68m": (2, 768, 3072, 12, 12, 64, 32000, False),
    "llama3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256, False),
    "llama3.2-1b": (16, 2048, 8192, 32, 8, 64, 128256, True),
    "llama3.2-3b": (28, 3072, 8192, 24, 8, 128, 128256, True),
    "tinyllama-1.1b": (22, 2048, 5632, 32, 4, 64, 32000, False),
    "smollm2-135m": (30, 576, 1536, 9, 3, 64, 49152, True),
    "smollm2-360m": (32, 960, 2560, 15, 5, 64, 49152, True),
    "smollm2-1.7b": (24, 2048, 8192, 32, 32, 64, 49152, True),
}


def shape_of(name: str) -> ModelConfig | None:
    """The shape of a model in `config.MODELS`, None for any other name."""
    if name not in _SHAPES:
        return None
    L, E, intermediate_size, H, K, D, V, tied = _SHAPES[name]
    return ModelConfig(
        num_layers=L, hidden_size=E, intermediate_size=intermediate_size, num_heads=H, num_kv_heads=K, head_dim=D,
        vocab_size=V, context_length=MODELS[name].context, tie_word_embeddings=tied, name=name,
    )  # fmt: skip
