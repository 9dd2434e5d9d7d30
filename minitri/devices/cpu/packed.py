"""Linear layers in oneDNN's layout, for a CPU without compiled kernels, for inference only.

oneDNN streams weights up to twice as fast from its own blocked layout, for any number of rows.
"""

import torch
from torch import Tensor, nn

from minitri.core.model.linear import Linear, TiedHead
from minitri.devices.replace import Factories


class PackedLinear(Linear):
    """Linear layer with W in oneDNN's layout, which cannot be converted back."""

    def __init__(self, plain: Linear) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach()), plain.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")


class PackedTiedHead(TiedHead):
    """Tied LM head that multiplies with a packed copy of the embedding table."""

    def __init__(self, plain: TiedHead) -> None:
        super().__init__(plain.weight)
        self.packed = PackedLinear(plain)

    def forward(self, x: Tensor) -> Tensor:
        return self.packed(x)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch has oneDNN's kernel for packed weights of this dtype on this device."""
    kernels = torch.ops.mkldnn
    if device.type != "cpu" or not hasattr(kernels, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return kernels._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return kernels._is_mkldnn_fp16_supported()
    return dtype == torch.float32


def pack_linears(model: nn.Module) -> None:
    """Puts every plain linear layer of a model into oneDNN's layout.
    One by one, so that few weights exist twice."""
    packed: Factories = {Linear: PackedLinear, TiedHead: PackedTiedHead}
    for name, layer in list(model.named_modules()):
        if pack := packed.get(type(layer)):
            model.set_submodule(name, pack(layer))
            del layer.weight
