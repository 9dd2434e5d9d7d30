"""Copies of a model in 4 or 8 bits, which guess with the retrieval cache on a GPU.

Groups of `GROUP` weights of a row share a scale in float32; the last group of a row may be padded.
Embedding table and norms are those of the model, the LM head has 8 bits.
Legend: N out_features, E in_features, G groups of a row, Q weights of a group, X bytes of a row.
"""

import torch
from torch import Tensor, nn

from minitri.core.errors import InputError, explain
from minitri.core.model.linear import Linear, TiedHead
from minitri.core.model.llama import Llama
from minitri.core.roofline import GROUP
from minitri.devices.gpu.kernels import problem_with
from minitri.devices.replace import copy_with

TOLERANCE = 0.02  # allowed error of the kernel, as a share of the largest result, in bfloat16


class QuantizedLinear(Linear):
    """Linear layer y = x W^T + b with W in 4 or 8 bits."""

    def __init__(self, plain: Linear, bits: int) -> None:
        parts = [quantize(rows_NE, bits) for rows_NE in plain.weight.split(4096)]
        weights, scales = zip(*parts, strict=True)
        super().__init__(nn.Parameter(torch.cat(weights), requires_grad=False), plain.bias)
        self.scales = nn.Parameter(torch.cat(scales, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        from minitri.devices.gpu.kernels.weights import multiply  # needs Triton

        y = multiply(x, self.weight, self.scales)
        return y if self.bias is None else y + self.bias


def quantize(weight_NE: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantizes a matrix to 4 or 8 bits: (N, X) int8, and a scale for each group, (G, N).
    A group's largest magnitude stays exact. With 4 bits a byte has two weights, each plus 8:
    one of the group's first half in the low nibble, one of the second half in the high nibble."""
    limit = 1 << bits - 1
    wide_NE = torch.nn.functional.pad(weight_NE, (0, -weight_NE.shape[1] % GROUP)).float()
    groups_NGQ = wide_NE.unflatten(1, (-1, GROUP))
    least_NG, most_NG = groups_NGQ.aminmax(dim=2)
    scales_NG = torch.where(most_NG > -least_NG, most_NG, least_NG) / -limit
    safe_NG1 = scales_NG.where(scales_NG != 0, 1).unsqueeze(2)
    quants_NGQ = (groups_NGQ / safe_NG1).round_().clamp_(-limit, limit - 1)
    if bits == 4:
        low, high = (quants_NGQ + 8).to(torch.uint8).chunk(2, dim=2)
        quants_NGQ = (low | high << 4).view(torch.int8)
    return quants_NGQ.to(torch.int8).flatten(1), scales_NG.T.contiguous()


def dequantize(weight_NX: Tensor, scales_GN: Tensor) -> Tensor:
    """Dequantizes the weights and scales of `quantize` to (N, E), E in whole groups, in float32."""
    bytes_NGX = weight_NX.unflatten(1, (len(scales_GN), -1))
    if bytes_NGX.shape[2] < GROUP:
        bytes_NGX = torch.cat((bytes_NGX & 15, bytes_NGX >> 4 & 15), 2) - 8
    return (bytes_NGX * scales_GN.T.unsqueeze(2)).flatten(1)


def copy_in_few_bits(model: Llama, bits: int) -> Llama:
    """A copy of a model: linear layers in 4 or 8 bits, the LM head in 8. Raises `InputError`."""
    wanted = f"draft_weights=int{bits} cannot be had on {model.device}"
    if problem := problem_with(lambda: check_kernel(model, bits)):
        raise InputError(f"{wanted} ({problem})", "leave it out")

    def quantized(layer: Linear) -> QuantizedLinear:
        return QuantizedLinear(layer, 8 if layer.weight is model.lm_head.weight else bits)

    with explain(wanted, "leave it out"):  # raised where memory is short
        return copy_with(model, {Linear: quantized, TiedHead: quantized})


def check_kernel(model: Llama, bits: int) -> None:
    """Raises an error if the Triton product with 8 or `bits` bits differs from PyTorch's."""
    from minitri.devices.gpu.kernels.flash_decoding import num_processors
    from minitri.devices.gpu.kernels.weights import COLUMNS, multiply

    x = torch.randn(35, 640, generator=torch.Generator().manual_seed(0))
    x = x.to(model.device, model.dtype)
    many = COLUMNS * num_processors(model.device) // len(x) + 1  # other tiles serve large matrices
    for matrix in (quantize(x, bits), quantize(x, 8), quantize(x.repeat(many, 1), bits)):
        exact = x.float() @ dequantize(*matrix).T
        atol = TOLERANCE * float(exact.max())
        for M in (3, 35):
            got = multiply(x[:M], *matrix).float()
            torch.testing.assert_close(got, exact[:M], rtol=0, atol=atol)
