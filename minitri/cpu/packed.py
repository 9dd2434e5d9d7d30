"""Linear layers repacked for a CPU.

Decoding reads every weight once per token, so the speed of a small matmul is the speed at which
weights stream from memory. oneDNN streams them up to twice as fast from its own blocked layout, for
any number of rows. Nothing can be read back from that layout, so an LM head that is the embedding
table, too, has a plain blocked one, equally fast for one row, from which rows are gathered.

Packed layers are for inference only: they cannot be saved or trained.

Legend: T rows of input, E in_features, V out_features, N blocks of R rows of W.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitri.model.linear import Linear, TiedHead

BLOCK = 64
"""Rows of W in a block of a tied head; of the powers of two the fastest at T = 1."""


class PackedLinear(nn.Module):
    """y = x W^T + b with W in oneDNN's layout."""

    def __init__(self, plain: Linear) -> None:
        """Takes the weight away from a plain layer, so that its memory is free at once."""
        super().__init__()
        self.out_features = plain.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach())
        self.bias = plain.bias
        del plain.weight

    def forward(self, x: Tensor) -> Tensor:
        kernel = torch.ops.mkldnn._linear_pointwise.default
        return kernel(x, self.weight, self.bias, "none", [], "")


class PackedTiedHead(TiedHead):
    """A tied head with W as blocks (N, E, R), each transposed; the last is filled up with zeros."""

    def __init__(self, plain: TiedHead) -> None:
        """Takes the weight away from a plain head, so that its memory is free at once."""
        nn.Module.__init__(self)  # a plain head's would allocate another table
        self.out_features = plain.out_features
        w_VE = F.pad(plain.weight.detach(), (0, 0, 0, -plain.out_features % BLOCK))
        del plain.weight
        self.weight = w_VE.unflatten(0, (-1, BLOCK)).transpose(1, 2).contiguous()

    def rows(self, numbers: Tensor) -> Tensor:
        return self.weight[numbers // BLOCK, :, numbers % BLOCK]

    def forward(self, x: Tensor) -> Tensor:
        x_TE = x.reshape(-1, x.shape[-1])
        if len(x_TE) > BLOCK:  # with many rows arithmetic counts, which is faster in plain layout
            return F.linear(x, self.weight.transpose(1, 2).flatten(0, 1)[: self.out_features])
        y_NTR = torch.bmm(x_TE.expand(len(self.weight), -1, -1), self.weight)
        return y_NTR.transpose(0, 1).reshape(*x.shape[:-1], -1)[..., : self.out_features]


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
    """Replaces every plain linear layer of a model; at most one of them is in memory twice."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is TiedHead:
                setattr(parent, name, PackedTiedHead(child))
            elif type(child) is Linear:
                setattr(parent, name, PackedLinear(child))
