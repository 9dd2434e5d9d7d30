"""A copy of a model with int8 weights, which proposes with the retrieval cache on a GPU.

Decoding reads every weight in every pass; the copy reads half as many bytes. It only proposes: the
model itself, in its own number type, verifies whatever the copy says, and reads the prompt. Weights
are int8 with one scale per row of a matrix, in float32. Embedding table and norms are the model's
own. On a CPU the plain formula stands for the kernel, for tests.

Legend: N out_features, E in_features.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from minitri.errors import InputError
from minitri.gpu.kernels import problem_with
from minitri.model.linear import Linear, TiedHead
from minitri.model.llama import Llama
from minitri.model.replace import copy_with
from minitri.roofline import eight_bit_bytes

TOLERANCE = 0.02
"""Largest error of a kernel, as a share of the largest result: what bfloat16 explains."""

Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]
"""scales * x W^T, (..., N), from x (..., E), W (N, E) of 8 bits and scales (N,)."""


class EightBitLinear(Linear):
    """y = x W^T + b with W in int8."""

    def __init__(self, plain: Linear, multiply: Multiply) -> None:
        """Another layer's shape and bias, its weights rounded."""
        weight_NE, scales_N = quantize(plain.weight)
        super().__init__(nn.Parameter(weight_NE, requires_grad=False), plain.bias)
        self.multiply = multiply
        self.scales = nn.Parameter(scales_N, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.multiply(x, self.weight, self.scales)
        return y if self.bias is None else y + self.bias


def quantize(weight_NE: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in int8, and the scale of each row, by which its largest number is met."""
    scales_N = weight_NE.abs().amax(1).float().div_(127).clamp_min_(1e-30)
    return (weight_NE.float() / scales_N.unsqueeze(1)).round_().to(torch.int8), scales_N


def multiply_math(x: Tensor, weight_NE: Tensor, scales_N: Tensor) -> Tensor:
    """The plain formula: the oracle of the kernel."""
    return (x.float() @ weight_NE.float().T * scales_N).to(x.dtype)


def eight_bit_copy(model: Llama) -> Llama:
    """A copy of a model with linear layers in int8; it shares the rest.

    Raises `InputError` if the kernel does not work on
    the device, or if there is no room.
    """
    make = partial(EightBitLinear, multiply=kernel_for(model))
    try:
        return copy_with(model, {Linear: make, TiedHead: make})
    except torch.OutOfMemoryError:
        raise InputError(
            f"--draft-weights int8 needs {eight_bit_bytes(model.config) / 2**30:.2f} GiB more on "
            f"{model.device} than are free; leave it out"
        ) from None


def kernel_for(model: Llama) -> Multiply:
    """The kernel for a model's device, tried there. Raises `InputError`."""
    if model.device.type == "cpu":
        return multiply_math
    if problem := problem_with(lambda: check_kernel(model)):
        raise InputError(
            f"--draft-weights int8 does not work on {model.device} ({problem}); leave it out"
        )
    from minitri.gpu.kernels.weights import multiply

    return multiply


def check_kernel(model: Llama) -> None:
    """Raises an error if the kernel differs from the plain formula."""
    from minitri.gpu.kernels.weights import multiply

    x = torch.randn(35, 640, generator=torch.Generator().manual_seed(0))
    x = x.to(model.device, model.dtype)
    matrix = quantize(x)
    exact = multiply_math(x, *matrix)
    atol = TOLERANCE * float(exact.max())
    for M in (3, 35):
        torch.testing.assert_close(multiply(x[:M], *matrix), exact[:M], rtol=0, atol=atol)
