"""A linear layer whose weight can be repacked for the CPU.

Decoding reads every weight once per token, so the speed of a small matmul is the speed at which weights stream from
memory. oneDNN streams them up to twice as fast from its own blocked layout, for any number of rows. `pack` converts a
layer in place; the ordinary weight is freed, so memory holds one copy (an LM head tied to the embedding table keeps
the table, from which rows are gathered, beside the packed copy).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T + b with W of shape (out_features, in_features)."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False) if bias else None
        self.packed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Moves the weight into oneDNN's layout. For inference only: a packed weight cannot be read back or saved."""
        packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
        del self.weight
        self.weight = packed
        self.packed = True


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of PyTorch on this CPU has the packed kernel for the dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return dtype == torch.float32


def pack_linears(model: nn.Module) -> None:
    """Packs every `Linear` of a model, one after the other, so that at most one is in memory twice."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()
