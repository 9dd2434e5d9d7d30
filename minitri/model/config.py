"""What a model is: frozen dataclasses, and the table of named models.

A `ModelConfig` is the shape of a Llama, whatever file it came from. This module reads no files and knows no tensors.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minitri.errors import InputError, shorten

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: `theta` and how its frequencies are stretched to longer contexts."""

    theta: float = 10000.0
    """Base of the geometric series of wavelengths."""
    kind: str = "default"
    """One of `ROPE_KINDS`."""
    factor: float = 1.0
    """How many times longer than `original_context` the context is meant to be."""
    original_context: int | None = None
    """Context length in tokens of the pre-training, which llama3 and yarn refer to."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_context / low_freq_factor are interpolated fully."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_context / high_freq_factor are left alone."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more than this many times in original_context are left alone."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less than this many times in original_context are interpolated fully."""
    attention_factor: float | None = None
    """yarn: scale of cos and sin; None means 0.1 ln(factor) + 1."""
    truncate: bool = True
    """yarn: round the two borders of the ramp outwards to whole dimensions."""
    frequency_divisors: tuple[float, ...] | None = None
    """Divisors of the D/2 frequencies stored in a GGUF file (`rope_freqs.weight`), in place of a formula."""

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise InputError(
                f"RoPE type {self.kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}"
            )
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise InputError(
                f"RoPE theta must be a number above 1, got {self.theta}; check rope_theta in the config"
            )
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise InputError(
                f"RoPE factor must be a positive number, got {self.factor}; check the scaling factor"
            )
        if self.kind in ("llama3", "yarn") and (self.original_context or 0) < 1:
            raise InputError(
                f"RoPE type {self.kind} needs the original context length, got {self.original_context}; "
                "set original_max_position_embeddings in the config"
            )
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(
                    f"RoPE {name} must be positive, got {getattr(self, name)}; check the config"
                )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], default_context: int) -> RopeConfig:
        """Reads `rope_theta` and `rope_scaling` (or the newer `rope_parameters`) of a Hugging Face config.json."""
        scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        if (scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
            raise InputError(
                "RoPE turns only a part of each head (partial_rotary_factor), which no Llama does; check it"
            )
        theta = float(scaling.get("rope_theta") or config.get("rope_theta") or cls.theta)
        kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
        if kind == "default":
            return cls(theta=theta)
        original = scaling.get("original_max_position_embeddings") or default_context
        factor = scaling.get("factor")
        if factor is None:
            raise InputError(
                f"RoPE type {kind} has no factor, got {shorten(scaling)}; set it in config.json"
            )
        if scaling.get("mscale") or scaling.get("mscale_all_dim"):
            raise InputError(
                "RoPE scaling uses mscale, which Llama models do not; set attention_factor instead"
            )
        options: dict[str, Any] = {
            name: float(scaling[name])
            for name in (
                "low_freq_factor",
                "high_freq_factor",
                "beta_fast",
                "beta_slow",
                "attention_factor",
            )
            if scaling.get(name) is not None
        }
        return cls(
            theta=theta,
            kind=kind,
            factor=float(factor),
            original_context=int(original),
            truncate=bool(scaling.get("truncate", True)),
            **options,
        )

    def describe(self) -> str:
        """A few words for the log, such as `yarn x4 (theta 100000)`."""
        stretch = "plain" if self.kind == "default" else f"{self.kind} x{self.factor:g}"
        if self.frequency_divisors is not None:
            stretch += " with stored divisors"
        return f"{stretch} (theta {self.theta:g})"


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama: everything that decides which tensors there are and what the forward pass computes."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    """Longest sequence in tokens, prompt and output together, that the positions are made for."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    """The LM head is the embedding table."""
    attention_bias: bool = False
    """The q, k, v and o projections have biases."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = "llama"
    draft_of: str | None = None
    """A drafter without an embedding table: it reads tokens from that of the target of this name."""
    head_size: int | None = None
    """Tokens that the LM head of such a drafter can say, the frequent ones."""

    def __post_init__(self) -> None:
        for name in (
            "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
            "context_length",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise InputError(
                    f"model config has {name}={getattr(self, name)}; it must be at least 1"
                )
        if self.draft_of is not None and not 1 <= (self.head_size or 0) <= self.vocab_size:
            raise InputError(
                f"{self.name} is a drafter with head_size={self.head_size}; it must be from 1 to {self.vocab_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model config has {self.num_heads} query heads and {self.num_kv_heads} KV heads; "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise InputError(
                f"model config has an odd head_dim={self.head_dim}; rotary embeddings need an even one"
            )

    @property
    def kv_values_per_token(self) -> int:
        """Numbers, not bytes, that one token adds to a full KV cache: 2 L K D."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, name: str = "llama") -> ModelConfig:
        """From the dictionary in a Hugging Face config.json. Raises `InputError` for anything that is not a Llama."""
        kind = config.get("model_type")
        if kind != "llama":
            raise InputError(
                f"{name} is a {kind!r} model; minitri runs the Llama architecture (model_type 'llama') only"
            )
        for key, wanted in (
            ("hidden_act", "silu"),
            ("mlp_bias", False),
            ("quantization_config", None),
        ):
            if config.get(key, wanted) != wanted:
                raise InputError(
                    f"{name} has {key}={shorten(repr(config[key]), 60)}, which minitri does not run; use a checkpoint "
                    f"with {key}={wanted}"
                )
        try:
            num_heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
            context = int(config.get("max_position_embeddings", 2048))
            bos = as_token_ids(config.get("bos_token_id"))
            draft_of = config.get("draft_of")
            return cls(
                num_layers=int(config["num_hidden_layers"]),
                hidden_size=hidden_size,
                intermediate_size=int(config["intermediate_size"]),
                num_heads=num_heads,
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or hidden_size // num_heads),
                vocab_size=int(config["vocab_size"]),
                context_length=context,
                rope=RopeConfig.from_hf(config, context),
                rms_norm_eps=float(config.get("rms_norm_eps", cls.rms_norm_eps)),
                tie_word_embeddings=as_bool(config.get("tie_word_embeddings")),
                attention_bias=as_bool(config.get("attention_bias")),
                bos_token_id=bos[0] if bos else None,
                eos_token_ids=as_token_ids(config.get("eos_token_id")),
                name=name,
                draft_of=None if draft_of is None else str(draft_of),
                head_size=None if draft_of is None else int(config["head_size"]),
            )
        except KeyError as missing:
            raise InputError(
                f"{name}: config.json has no {missing}; get the complete config of the model"
            ) from None
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{name}: config.json holds a value of the wrong kind ({error}); get the original"
            ) from None

    def with_context(self, context_length: int) -> ModelConfig:
        """This model with another context length, in tokens."""
        return dataclasses.replace(self, context_length=context_length)

    def with_eos(self, token_ids: tuple[int, ...]) -> ModelConfig:
        """This model with other end-of-sequence tokens."""
        return dataclasses.replace(self, eos_token_ids=token_ids)

    def with_rope_scaling(self, text: str) -> ModelConfig:
        """This model stretched by a command-line setting such as `yarn:4`; the context grows by the factor.

        The factor counts from the context the model was trained with, so `yarn:4` on an 8K model gives 32K whatever
        scaling its config already had. `none` takes a scaling away.
        """
        if self.rope.frequency_divisors is not None:
            raise InputError(
                f"{self.name} brings a stretched RoPE of its own (rope_freqs in the GGUF file), which --rope-scaling "
                "cannot replace; use the model's Hugging Face folder, or leave the flag out"
            )
        base = self.rope.original_context or self.context_length
        if text == "none":
            plain = RopeConfig(theta=self.rope.theta)
            return dataclasses.replace(self, rope=plain, context_length=base)
        kind, _, number = text.partition(":")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if kind not in ROPE_KINDS[1:] or not (1 <= factor <= 1024):
            raise InputError(
                f"--rope-scaling {text!r} is not KIND:FACTOR with KIND one of {', '.join(ROPE_KINDS[1:])} and "
                "FACTOR from 1 to 1024; write for example yarn:4, or none"
            )
        rope = RopeConfig(theta=self.rope.theta, kind=kind, factor=factor, original_context=base)
        return dataclasses.replace(self, rope=rope, context_length=int(base * factor))


def as_token_ids(value: Any) -> tuple[int, ...]:
    """An `eos_token_id` of a config, which may be absent, one number, or several."""
    tokens = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise InputError(
            f"config has the token id {shorten(repr(value), 60)}, which is no whole number; correct it"
        )
    return tokens


def as_bool(value: Any) -> bool:
    """A switch of a config; absent means off."""
    if value not in (None, True, False):
        raise InputError(
            f"config has {shorten(repr(value), 60)} where true or false belongs; correct it"
        )
    return bool(value)


@dataclass(frozen=True)
class NamedModel:
    """A model known by a short name."""

    repo: str
    """Repository on the Hugging Face hub."""
    context: int
    """Context length in tokens."""
    draft: str
    """Default drafter: a name of this table, or `ngram`."""


MODELS: dict[str, NamedModel] = {
    "llama2-7b-128k": NamedModel("NousResearch/Yarn-Llama-2-7b-128k", 131072, "llama-68m"),
    "llama2-13b-128k": NamedModel("NousResearch/Yarn-Llama-2-13b-128k", 131072, "llama-68m"),
    "lwm-text-128k": NamedModel("LargeWorldModel/LWM-Text-128K", 131072, "llama-68m"),
    "lwm-text-256k": NamedModel("LargeWorldModel/LWM-Text-256K", 262144, "llama-68m"),
    "lwm-text-512k": NamedModel("LargeWorldModel/LWM-Text-512K", 524288, "llama-68m"),
    "lwm-text-1m": NamedModel("LargeWorldModel/LWM-Text-1M", 1048576, "llama-68m"),
    "lwm-text-chat-128k": NamedModel("LargeWorldModel/LWM-Text-Chat-128K", 131072, "llama-68m"),
    "llama-68m": NamedModel("JackFram/llama-68m", 2048, "ngram"),
    "llama3.1-8b": NamedModel("meta-llama/Llama-3.1-8B", 131072, "llama3.2-1b"),
    "llama3.2-1b": NamedModel("meta-llama/Llama-3.2-1B", 131072, "ngram"),
    "llama3.2-3b": NamedModel("meta-llama/Llama-3.2-3B", 131072, "llama3.2-1b"),
    "tinyllama-1.1b": NamedModel("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 2048, "llama-68m"),
    "smollm2-135m": NamedModel("HuggingFaceTB/SmolLM2-135M-Instruct", 8192, "smollm2-135m-draft"),
    "smollm2-360m": NamedModel("HuggingFaceTB/SmolLM2-360M-Instruct", 8192, "smollm2-135m"),
    "smollm2-1.7b": NamedModel("HuggingFaceTB/SmolLM2-1.7B-Instruct", 8192, "smollm2-135m"),
}
DEFAULT_MODEL = "smollm2-135m"


def unknown_model(name: str) -> InputError:
    """The error for a model that is neither a name, nor a path, nor a hub repository."""
    close = difflib.get_close_matches(name, MODELS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return InputError(
        f"unknown model {name!r}: {hint}give a folder or file, a hub repository ORG/NAME, or one of {', '.join(MODELS)}"
    )
