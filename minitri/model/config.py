"""The shape of a Llama, whatever file describes it: frozen dataclasses that hold no tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minitri.errors import InputError, shorten

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
POSITIVE_FACTORS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, and how its frequencies are stretched to longer contexts."""

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
    """yarn: dimensions that turn more often than this in original_context are left alone."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this in it are interpolated fully."""
    attention_factor: float | None = None
    """yarn: scale of cos and sin; None means 0.1 ln(factor) + 1."""
    truncate: bool = True
    """yarn: round the two borders of the ramp outwards to whole dimensions."""
    frequency_divisors: tuple[float, ...] | None = None
    """Divisors of the D/2 frequencies, which a GGUF file may store in place of a formula."""

    def __post_init__(self) -> None:
        theta, factor = self.theta, self.factor
        if self.kind not in ROPE_KINDS:
            raise InputError(
                f"RoPE type {self.kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}"
            )
        if not 1 < theta < math.inf:
            raise InputError(
                f"RoPE theta must be a number above 1, got {theta}; check rope_theta in the config"
            )
        if not 0 < factor < math.inf:
            raise InputError(
                f"RoPE factor must be a positive number, got {factor}; check the scaling factor"
            )
        if self.kind in ("llama3", "yarn") and (self.original_context or 0) < 1:
            raise InputError(
                f"RoPE type {self.kind} needs the original context length, got "
                f"{self.original_context}; set original_max_position_embeddings in the config"
            )
        for name in POSITIVE_FACTORS:
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InputError(f"RoPE {name} must be positive, got {value}; check the config")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], default_context: int) -> RopeConfig:
        """From a Hugging Face config.json, in its older form (`rope_scaling`) or its newer one."""
        scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        if (scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
            raise InputError(
                "RoPE turns only a part of each head (partial_rotary_factor), which no Llama does; "
                "check it"
            )
        theta = float(scaling.get("rope_theta") or config.get("rope_theta") or cls.theta)
        kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
        if kind == "default":
            return cls(theta=theta)
        if scaling.get("factor") is None:
            raise InputError(
                f"RoPE type {kind} has no factor, got {shorten(scaling)}; set it in config.json"
            )
        if scaling.get("mscale") or scaling.get("mscale_all_dim"):
            raise InputError(
                "RoPE scaling uses mscale, which Llama models do not; set attention_factor instead"
            )
        original = int(scaling.get("original_max_position_embeddings") or default_context)
        options: dict[str, Any] = {"truncate": bool(scaling.get("truncate", True))}
        for name in (*POSITIVE_FACTORS, "attention_factor"):
            if scaling.get(name) is not None:
                options[name] = float(scaling[name])
        return cls(theta, kind, float(scaling["factor"]), original, **options)

    def describe(self) -> str:
        """A few words for the log, such as `yarn x4 (theta 100000)`."""
        stretch = "plain" if self.kind == "default" else f"{self.kind} x{self.factor:g}"
        if self.frequency_divisors is not None:
            stretch += " with stored divisors"
        return f"{stretch} (theta {self.theta:g})"


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama: which tensors it has, and what the forward pass computes with them."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    """Longest sequence in tokens, prompt and output together."""
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
    """Name of the target whose embedding table this drafter borrows; None: it has its own. A small
    model is mostly that table. A drafter runs beside its target only, which has the table in memory
    already, so the drafter's files leave it out."""
    head_size: int | None = None
    """With `draft_of`: tokens that the drafter's LM head covers, the frequent ones of the
    vocabulary. It never guesses the others. That makes it faster, and cannot change a text."""

    def __post_init__(self) -> None:
        for name in (
            "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads",
            "head_dim", "vocab_size", "context_length",
        ):  # fmt: skip
            value = getattr(self, name)
            if value < 1:
                raise InputError(f"model config has {name}={value}; it must be at least 1")
        if self.draft_of is not None and not 1 <= (self.head_size or 0) <= self.vocab_size:
            raise InputError(
                f"{self.name} is a drafter with head_size={self.head_size}; it must be from 1 to "
                f"{self.vocab_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model config has {self.num_heads} query heads and {self.num_kv_heads} KV heads; "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise InputError(
                f"model config has an odd head_dim={self.head_dim}; rotary embeddings need an even "
                "one"
            )

    @property
    def kv_values_per_token(self) -> int:
        """Numbers, not bytes, that one token adds to a full KV cache: 2 L K D."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, name: str = "llama") -> ModelConfig:
        """From the dictionary in a Hugging Face config.json. Raises `InputError` for no Llama."""
        kind = config.get("model_type")
        if kind != "llama":
            raise InputError(
                f"{name} is a {kind!r} model; minitri runs the Llama architecture (model_type "
                "'llama') only"
            )
        required = {"hidden_act": "silu", "mlp_bias": False, "quantization_config": None}
        for key, wanted in required.items():
            if config.get(key, wanted) != wanted:
                raise InputError(
                    f"{name} has {key}={shorten(repr(config[key]), 60)}, which minitri does not "
                    f"run; use a checkpoint with {key}={wanted}"
                )
        try:
            return cls._read_hf(config, name)
        except InputError:
            raise
        except KeyError as missing:
            raise InputError(
                f"{name}: config.json has no {missing}; get the complete config of the model"
            ) from None
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise InputError(
                f"{name}: config.json holds a value of the wrong kind ({error}); get the original"
            ) from None

    @classmethod
    def _read_hf(cls, config: Mapping[str, Any], name: str) -> ModelConfig:
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

    def with_context(self, context_length: int) -> ModelConfig:
        """This model with another context length, in tokens."""
        return dataclasses.replace(self, context_length=context_length)

    def with_eos(self, token_ids: tuple[int, ...]) -> ModelConfig:
        """This model with other end-of-sequence tokens."""
        return dataclasses.replace(self, eos_token_ids=token_ids)

    def with_rope_scaling(self, text: str) -> ModelConfig:
        """This model stretched by a command-line setting such as `yarn:4`; its context grows, too.

        The factor counts from the context of the training: `yarn:4` on an 8K model gives 32K,
        whatever scaling its config already had. `none` takes a scaling away.
        """
        if self.rope.frequency_divisors is not None:
            raise InputError(
                f"{self.name} brings a stretched RoPE of its own (rope_freqs in the GGUF file), "
                "which --rope-scaling cannot replace; use the model's Hugging Face folder, or "
                "leave the flag out"
            )
        theta, base = self.rope.theta, self.rope.original_context or self.context_length
        if text == "none":
            return dataclasses.replace(self, rope=RopeConfig(theta), context_length=base)
        kind, _, number = text.partition(":")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if kind not in ROPE_KINDS[1:] or not (1 <= factor <= 1024):
            raise InputError(
                f"--rope-scaling {text!r} is not KIND:FACTOR with KIND one of "
                f"{', '.join(ROPE_KINDS[1:])} and FACTOR from 1 to 1024; write for example yarn:4, "
                "or none"
            )
        rope = RopeConfig(theta, kind, factor, base)
        return dataclasses.replace(self, rope=rope, context_length=int(base * factor))


def as_token_ids(value: Any) -> tuple[int, ...]:
    """An `eos_token_id` of a config, which may be absent, one number, or several."""
    tokens = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise InputError(
            f"config has the token id {shorten(repr(value), 60)}, which is no whole number; "
            "correct it"
        )
    return tokens


def as_bool(value: Any) -> bool:
    """A switch of a config; absent means off."""
    if value not in (None, True, False):
        raise InputError(
            f"config has {shorten(repr(value), 60)} where true or false belongs; correct it"
        )
    return bool(value)
