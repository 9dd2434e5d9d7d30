"""Linear layers whose weights can be repacked for the CPU.

Decoding reads every weight once per token, so the speed of a small matmul is the speed at which weights stream from
memory. oneDNN streams them up to twice as fast from its own blocked layout, for any number of rows. `pack` converts a
layer in place; the ordinary weight is freed, so memory holds one copy. Nothing can be read back from that layout, so an
LM head tied to the embedding table has a plain blocked one, equally fast for one row, from which rows are gathered.

Legend: T rows of input, E in_features, V out_features, N blocks of R rows of W.
"""

from __future__ import annotations

import math
import mmap

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T + b with W of shape (out_features, in_features)."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.out_features = out_features
        self.weight: Tensor = nn.Parameter(
            empty_weight(out_features, in_features, dtype), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False)
            if bias
            else None
        )
        self.packed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.default(
                x, self.weight, self.bias, "none", [], ""
            )
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Moves the weight into oneDNN's layout. For inference only: a packed weight cannot be read back or saved."""
        packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
        del self.weight
        self.weight = packed
        self.packed = True


class TiedHead(Linear):
    """An LM head that is the embedding table, too: y = x W^T, and rows of W by their numbers."""

    BLOCK = 64
    """Rows of W in a block; of the powers of two the fastest at T = 1."""

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows of W, (..., E), for integers of any shape."""
        if self.packed:
            return self.weight[numbers // self.BLOCK, :, numbers % self.BLOCK]
        return F.embedding(numbers, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            return super().forward(x)
        x_TE = x.reshape(-1, x.shape[-1])
        if (
            len(x_TE) > self.BLOCK
        ):  # of many rows the arithmetic counts, for which the plain layout is better
            return F.linear(x, self.weight.transpose(1, 2).flatten(0, 1)[: self.out_features])
        y_NTR = torch.bmm(x_TE.expand(len(self.weight), -1, -1), self.weight)
        return y_NTR.transpose(0, 1).reshape(*x.shape[:-1], -1)[..., : self.out_features]

    def pack(self) -> None:
        """Moves W into the layout (N, E, R), each block transposed; the last one is filled up with zeros."""
        w_VE = F.pad(self.weight.detach(), (0, 0, 0, -self.out_features % self.BLOCK))
        del self.weight
        self.weight = w_VE.unflatten(0, (-1, self.BLOCK)).transpose(1, 2).contiguous()
        self.packed = True


class TrimmedHead(Linear):
    """An LM head over a part of the vocabulary; every other token has a logit of -inf, hence probability 0."""

    token_ids: Tensor
    """Which token each row stands for."""

    def __init__(
        self, in_features: int, num_tokens: int, vocab_size: int, *, dtype: torch.dtype
    ) -> None:
        super().__init__(in_features, num_tokens, bias=False, dtype=dtype)
        self.vocab_size = vocab_size
        self.register_buffer("token_ids", torch.zeros(num_tokens, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        known = super().forward(x)
        logits = known.new_full((*known.shape[:-1], self.vocab_size), -math.inf)
        return logits.index_copy_(-1, self.token_ids, known)


def empty_weight(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised weight on the default device; where it will be packed, in pages of its own.

    Packing frees such pages for good. An ordinary tensor of a small model leaves a hole in the C library's heap, a
    little too small for the next packed weight because that is aligned to 4096 bytes: 40 MB in all for SmolLM2-135M.
    Raises `RuntimeError` where there is no room, like PyTorch.
    """
    if not can_pack(dtype, torch.get_default_device()):
        return torch.empty(rows, columns, dtype=dtype)
    try:
        pages = mmap.mmap(-1, rows * columns * dtype.itemsize)
    except (OSError, ValueError, OverflowError) as error:
        raise RuntimeError(
            f"cannot allocate a weight of shape ({rows}, {columns}): {error}"
        ) from None
    return torch.frombuffer(pages, dtype=dtype).view(rows, columns)


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
