"""Configuration of a model: sizes, norms and RoPE, independent of file formats. No tensors."""

import re
from dataclasses import MISSING, dataclass, field, replace

from minitri.core.errors import InputError
from minitri.core.fields import between, check_fields, one_of, refuse


@dataclass(frozen=True)
class RopeConfig:
    """Settings of RoPE and of its scaling to longer contexts; the bounds keep all angles finite."""

    label = "RoPE "  # begins error messages
    theta: float = between(10000.0, 1.001, 1e15)  # base of the geometric series of wavelengths
    kind: str = one_of("default", "default", "linear", "llama3", "yarn", "longrope")
    """Rule that scales frequencies to longer contexts; default: none."""
    factor: float = between(1.0, 1.0, 1e6)  # context length / `original_context`
    original_context: int | None = between(None, 1)  # tokens, of the pre-training
    low_freq_factor: float = between(1.0, 1e-6, 1e6)
    """llama3: wavelengths above original_context / low_freq_factor are interpolated fully."""
    high_freq_factor: float = between(4.0, 1e-6, 1e6)
    """llama3: wavelengths below original_context / high_freq_factor are unchanged."""
    beta_fast: float = between(32.0, 1e-6, 1e6)
    """yarn: dimensions that rotate more often than this in original_context are unchanged."""
    beta_slow: float = between(1.0, 1e-6, 1e6)
    """yarn: dimensions that rotate less often than this in original_context are interpolated."""
    attention_factor: float | None = between(None, 1e-3, 1e3)
    """yarn, longrope: factor of cosines and sines. Default of yarn: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """yarn: round the range of dimensions with mixed frequencies outwards to whole numbers."""
    frequency_divisors: tuple[float, ...] | None = None
    """A divisor of each frequency, after `kind` has scaled it; some checkpoints store them."""
    rotary_dim: int | None = between(None, 2)
    """How many numbers of a head of q or k rotate: in checkpoints the first. Default: all."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.high_freq_factor < 1.001 * (low := self.low_freq_factor):
            refuse(self, "high_freq_factor", f"it must be more than the low one, {low}")
        if self.beta_fast < self.beta_slow:
            refuse(self, "beta_fast", f"it must be at least beta_slow, {self.beta_slow}")
        if not all(1e-6 <= divisor <= 1e6 for divisor in self.frequency_divisors or ()):
            refuse(self, "frequency_divisors", "each must be from 1e-6 to 1e6")

    def describe(self) -> str:
        """A description for the log, such as `yarn x4 (theta 100000)`."""
        return f"{self.kind} x{self.factor:g} (theta {self.theta:g})"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a Llama, or of a related model such as Qwen."""

    label = "model config: "
    num_layers: int = between(MISSING, 1, 1000)  # transformer blocks
    hidden_size: int = between(MISSING, 1)  # numbers of a token's hidden state
    intermediate_size: int = between(MISSING, 1)  # hidden numbers of the MLP
    num_heads: int = between(MISSING, 1)  # query heads
    num_kv_heads: int = between(MISSING, 1)  # heads of K and V, each for a group of query heads
    head_dim: int = between(MISSING, 1)  # numbers of a head of q, k or v
    vocab_size: int = between(MISSING, 1)  # tokens that the model knows
    context_length: int = between(MISSING, 1)  # tokens of prompt and output together
    rope: RopeConfig = field(default_factory=RopeConfig)
    rms_norm_eps: float = between(1e-6, 1e-12, 0.1)  # added to the mean square in RMSNorm
    tie_word_embeddings: bool = False  # whether the LM head is the embedding table
    attention_bias: bool = False  # whether the q, k and v projections add one
    bos_token_id: int | None = between(None, 0)  # beginning of a text
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a text
    name: str = "llama"  # of the model, in messages
    draft_of: str | None = None
    """Name of the target whose embedding table this drafter shares, if any."""
    head_size: int | None = between(None, 1)
    """With `draft_of`: number of most frequent tokens that the drafter's LM head covers."""
    output_bias: bool | None = None  # whether the o projection adds one; None: if q, k, v do
    head_norm: bool = False  # RMSNorm of each head of q and k before RoPE, as in Qwen3
    joint_norm: bool = False  # RMSNorm of all of q, and of all of k, before RoPE, as in OLMo 2
    norms_before: bool = True  # there are norms before attention and MLP
    norms_after: bool = False  # there are norms after attention and MLP
    wide_norms: bool = False  # norms and their weights are float32, as in Gemma
    geglu: bool = False  # the MLP's gate is GELU, approximated by tanh, not SiLU
    embedding_scale: float = between(1.0, 1e-6, 1e6)  # factor of embeddings, as in Granite
    score_scale: float | None = between(None, 1e-6, 1e6)  # factor of q k; None: 1 / sqrt(head_dim)
    residual_scale: float = between(1.0, 1e-6, 1e6)  # factor of what attention and MLP add
    logit_divisor: float = between(1.0, 1e-6, 1e6)  # divides the LM head's output
    unrotated_layers: tuple[int, ...] = ()  # numbers of layers without RoPE, as in SmolLM3
    sliding_window: int | None = between(None, 1)  # tokens seen in `sliding_layers`; None: all
    sliding_layers: tuple[int, ...] = ()  # numbers of layers with a sliding window
    window_rope: RopeConfig | None = None  # of `sliding_layers`, as in Gemma 3; None: `rope`

    def __post_init__(self) -> None:
        check_fields(self)
        if self.draft_of is not None and not 1 <= (self.head_size or 0) <= self.vocab_size:
            refuse(self, "head_size", f"it must be from 1 to {self.vocab_size}")
        if not all(type(token) is int and token >= 0 for token in self.eos_token_ids):
            refuse(self, "eos_token_ids", "they must be whole numbers from 0")
        if self.num_heads % self.num_kv_heads:
            refuse(self, "num_heads", f"it must be a multiple of {self.num_kv_heads} K/V heads")
        rotating = self.rope.rotary_dim or self.head_dim
        if self.head_dim % 2 or rotating % 2 or rotating > self.head_dim:
            refuse(self, "head_dim", f"RoPE of {rotating} of its numbers needs an even one")
        if len(self.rope.frequency_divisors or range(rotating // 2)) != rotating // 2:
            refuse(self.rope, "frequency_divisors", f"there must be {rotating // 2}")
        if self.unrotated_layers and self.score_scale is not None:  # RoPE applies the scale
            refuse(self, "score_scale", "it must be None with layers without RoPE")

    @property
    def is_plain(self) -> bool:
        """Whether fused GPU kernels, and whole passes in one CPU call, support all its options."""
        is_scaled = (self.embedding_scale, self.residual_scale, self.logit_divisor) != (1, 1, 1)
        return self.has_kernels and not (is_scaled or self.unrotated_layers)

    @property
    def has_kernels(self) -> bool:
        """Whether the compiled CPU kernels support all the model's options."""
        is_llama = self.norms_before and not (self.norms_after or self.wide_norms or self.geglu)
        return is_llama and not (self.joint_norm or self.window)

    @property
    def window(self) -> int:
        """Tokens that `sliding_layers` see; 0 if they are computed like all other layers."""
        window = self.sliding_window or 0
        is_idle = window >= self.context_length and not self.window_rope
        return 0 if is_idle or not self.sliding_layers else window

    @property
    def kv_values_per_token(self) -> int:
        """Numbers (not bytes) that one token adds to a full KV cache: 2 L K D."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def share(self, count: int) -> "ModelConfig":
        """Config of one of `count` equal shares of the model, one per GPU. Raises `InputError`."""
        divided = ("num_heads", "num_kv_heads", "intermediate_size")
        sizes = {name: getattr(self, name) for name in divided}
        if count > 1 and self.joint_norm:
            raise InputError(f"{self.name} has norms over all heads; use one GPU")
        if any(size % count for size in sizes.values()):
            raise InputError(
                f"{self.name} cannot be split over {count} ranks: {sizes} must be multiples of "
                "that; use another number of GPUs, or another model"
            )
        shares = {name: size // count for name, size in sizes.items()}
        return replace(self, vocab_size=-(-self.vocab_size // count), **shares)


def stretch_rope(config: ModelConfig, text: str) -> ModelConfig:
    """A copy of `config` with the context extended by `text`, KIND:FACTOR, such as `yarn:4`.
    This replaces the RoPE scaling in `config`. Raises `InputError`."""
    if config.rope.frequency_divisors:
        got = f"{config.name} brings a stretched RoPE of its own (rope_freqs, or LongRoPE)"
        raise InputError(f"{got}, which rope_scaling= cannot replace; leave it out")
    if not (found := re.fullmatch(r"(linear|llama3|yarn):([1-9]\d{0,5}(?:\.\d+)?)", text)):
        raise InputError(
            f"rope_scaling={text!r} is not KIND:FACTOR; try yarn:4, linear:2, llama3:8"
        )
    old = config.rope
    base = old.original_context or config.context_length
    rope = RopeConfig(old.theta, found[1], float(found[2]), base, rotary_dim=old.rotary_dim)
    return replace(config, rope=rope, context_length=int(base * rope.factor))
