"""The shape of a model, whatever file describes it: frozen dataclasses that hold no tensors."""

import dataclasses
from dataclasses import dataclass, field
from typing import Self

from minitri.errors import InputError, shorten

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
LONGEST_CONTEXT = 2**31 - 1
ROPE_RANGES = {
    "theta": (1.001, 1e15), "factor": (1, 1e6), "original_context": (1, LONGEST_CONTEXT),
    "low_freq_factor": (1e-6, 1e6), "beta_slow": (1e-6, 1e6), "attention_factor": (1e-3, 1e3),
}  # fmt: skip
"""Least and largest value of a setting: all models are far inside, and angles stay finite."""


def check_range(name: str, value: float | None, least: float, most: float) -> None:
    """Raises `InputError` for a number of a config that no model has; None is not set."""
    if value is not None and not least <= value <= most:
        raise InputError(
            f"model config has {name}={value}; it must be from {least:.6g} to {most:.15g}"
        )


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
        if self.kind not in ROPE_KINDS:
            raise InputError(
                f"RoPE type {shorten(repr(self.kind), 60)} is not supported; supported are "
                f"{', '.join(ROPE_KINDS)}"
            )
        ranges: dict[str, tuple[float, float]] = {
            **ROPE_RANGES, "beta_fast": (self.beta_slow, 1e6),
            "high_freq_factor": (1.001 * self.low_freq_factor, 1e6),
        }  # fmt: skip
        for name, (least, most) in ranges.items():
            check_range(f"RoPE {name}", getattr(self, name), least, most)
        for divisor in self.frequency_divisors or ():
            check_range("a RoPE divisor", divisor, 1e-6, 1e6)

    def describe(self) -> str:
        """A few words for the log, such as `yarn x4 (theta 100000)`."""
        stretch = "plain" if self.kind == "default" else f"{self.kind} x{self.factor:g}"
        if self.frequency_divisors is not None:
            stretch += " with stored divisors"
        return f"{stretch} (theta {self.theta:g})"


@dataclass(frozen=True)
class ModelConfig:
    """Which tensors a Llama or one of its relatives has, and what is computed with them."""

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
    """The q, k, v projections have biases; see `output_bias` for the o projection."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name: str = "llama"
    draft_of: str | None = None
    """Name of the target whose embedding table this drafter borrows; None: it has its own. A small
    model is mostly that table, which its target has in memory
    already, so the files of a drafter leave it out."""
    head_size: int | None = None
    """With `draft_of`: tokens that the drafter's LM head covers, the frequent ones of the
    vocabulary. It never guesses the others. That makes it faster, and cannot change a text."""
    output_bias: bool | None = None
    """The o projection has a bias; None: if q, k and v have."""
    head_norm: bool = False
    """An RMSNorm of every head of q and k before they are rotated, as in Qwen3."""

    def __post_init__(self) -> None:
        check_range("num_layers", self.num_layers, 1, 1000)
        check_range("rms_norm_eps", self.rms_norm_eps, 1e-12, 0.1)
        for name in (
            "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
            "vocab_size", "context_length",
        ):  # fmt: skip
            check_range(name, getattr(self, name), 1, LONGEST_CONTEXT)
        if self.draft_of is not None:
            check_range("head_size", self.head_size or 0, 1, self.vocab_size)
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

    def with_eos(self, token_ids: tuple[int, ...]) -> Self:
        """This model with other end-of-sequence tokens."""
        return dataclasses.replace(self, eos_token_ids=token_ids)
