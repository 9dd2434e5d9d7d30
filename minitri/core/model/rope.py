"""Rotary position embeddings: plain, linear, llama3, YaRN and LongRoPE.

`Rope` turns positions into cosines and sines (`Rotary`), once per forward pass or for a table.
Angles and rotation are float32 whatever the model's dtype.
Legend: B batch, T new tokens, H heads, D head dim.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.core.config import RopeConfig


@dataclass(frozen=True)
class Rotary:
    """Cosines and signed sines of one block of positions, each (B, T, 1, D) float32."""

    cos: Tensor
    signed_sin: Tensor  # negative in the first half of D

    def rotate(self, x_BTHD: Tensor) -> Tensor:
        """Rotates every head of the input; returns the same shape and dtype.
        Dimension i pairs with i + D/2: x cos + (-x2, x1) sin, x1 and x2 being the halves of x."""
        x = x_BTHD.float()
        swapped = x.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(x * self.cos, swapped, self.signed_sin).to(x_BTHD.dtype)


class Rope:
    """The rotary embedding of a model: D/2 inverse frequencies, and scales of cos and sin."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        frequencies, scale = rope_frequencies(config, head_dim)
        still = (0, head_dim // 2 - len(frequencies))  # pairs at the end that do not rotate
        self.frequencies = F.pad(frequencies, still).to(device)  # (D/2,) float32
        self.scale = F.pad(torch.full_like(frequencies, scale), still, value=1.0).to(device)

    def at(self, positions_BT: Tensor) -> Rotary:
        """Cosines and sines (B, T, 1, D) of a block at integer positions (B, T) in the text."""
        angles = positions_BT[..., None, None].float() * self.frequencies  # (B, T, 1, D/2)
        cos = angles.cos() * self.scale
        sin = angles.sin() * self.scale
        return Rotary(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def rope_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies of at most D/2 pairs in radians per token, and a factor for cos and sin.
    In float32. Sources: RoFormer; kaiokendev's interpolation (linear); Meta's Llama 3.1 (llama3);
    "YaRN: Efficient Context Window Extension", section 3; "LongRoPE", section 3."""
    head_dim = config.rotary_dim or head_dim
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (config.theta**exponents)
    scale = 1.0
    kept: Tensor | float = float(config.kind in ("default", "longrope"))  # not interpolated share
    if config.kind == "llama3":
        assert config.original_context
        low = config.low_freq_factor
        turns = config.original_context * plain / (2 * math.pi)
        kept = ((turns - low) / (config.high_freq_factor - low)).clamp(0, 1)  # 0 for long waves
    elif config.kind == "yarn":
        kept = _yarn_kept_share(config, head_dim)
        scale = config.attention_factor or 0.1 * math.log(config.factor) + 1
    elif config.kind == "longrope":
        scale = config.attention_factor or 1.0
    plain = plain / config.factor * (1 - kept) + plain * kept
    if config.frequency_divisors:
        plain = plain / torch.tensor(config.frequency_divisors, dtype=torch.float32)
    return plain, scale


def _yarn_kept_share(config: RopeConfig, head_dim: int) -> Tensor:
    """Share (D/2,) of each frequency that YaRN does not interpolate: 1, then a ramp, then 0."""
    assert config.original_context
    turns = (config.beta_fast, config.beta_slow)  # in original_context, of the ramp's two ends
    logs = (math.log(config.original_context / (times * 2 * math.pi)) for times in turns)
    low, high = (head_dim * log / (2 * math.log(config.theta)) for log in logs)
    if config.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    return 1 - ramp.clamp(0, 1)
