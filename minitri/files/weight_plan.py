"""The weight plan: the form of a model's weights in memory, decided once before they are read."""

from dataclasses import dataclass
from typing import Literal

import torch

from minitri.files.checkpoint import Checkpoint
from minitri.files.gguf.file import GgufFile
from minitri.files.named_models import ModelChoice


@dataclass(frozen=True)
class WeightPlan:
    """The forms of the target's weights, and of the weights that guess with the retrieval cache."""

    target: Literal["dense", "blocks"]
    """Dense: in one number type. Blocks: quantized, as a GGUF file stores them."""
    proposer: str
    """same: the target's. blocks: the blocks in its GGUF file. int4, int8: a quantized copy."""
    reason: str = ""
    """Why the target has blocks, although these are neither asked for nor fastest."""


def plan_weights(
    choice: ModelChoice,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    *,
    has_kernels: bool,
    prefers_blocks: bool,
    free_bytes: float,
) -> WeightPlan:
    """Decides the forms of a model's weights, on the compiled CPU kernels (`has_kernels`) or not.

    By default matrices of a GGUF file stay quantized if they decode fastest so (`prefers_blocks`),
    or if `free_bytes` do not suffice for dense ones and a copy."""
    proposer = choice.draft_weights
    if proposer in ("auto", "drafter"):
        proposer = "int4" if has_kernels and proposer == "auto" else "same"
    if choice.weights == "native":
        return WeightPlan("blocks", proposer)
    if not (has_kernels and isinstance(checkpoint, GgufFile) and checkpoint.quantized()):
        return WeightPlan("dense", proposer)
    has_copy = proposer == "int4" and checkpoint.has_at_most(6)
    dense = WeightPlan("dense", "blocks" if has_copy else proposer)
    if choice.weights == "dense":
        return dense
    proposing = "same" if choice.draft_weights == "auto" else proposer
    if prefers_blocks:
        return WeightPlan("blocks", proposing if checkpoint.has_at_most(8) else proposer)
    num_bytes = checkpoint.num_weights() * dtype.itemsize
    if proposer == "int4":
        num_bytes += checkpoint.num_bytes()  # at least as many as a copy in 4 bits has
    if num_bytes > free_bytes:
        kind = str(dtype).removeprefix("torch.")
        reason = f"in {kind} they and their copy take {num_bytes / 1e9:.1f} GB"
        reason += f", and {free_bytes / 1e9:.1f} GB of memory are free"
        return WeightPlan("blocks", proposing, reason)
    return dense
