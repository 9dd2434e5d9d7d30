"""A copy of a model with weights of 8 bits, which guesses with the retrieval cache on a GPU.

Decoding reads every weight in every pass; the copy reads half as many bytes. It only proposes: the
model itself, in its own number type, verifies whatever the copy says, and reads the prompt. Weights
are int8 or float8_e4m3fn with one scale per row of a matrix, in float32. Embedding table and norms
are the model's own. On a CPU the plain formula stands for the kernel, for tests.

Legend: N out_features, E in_features.
"""

import copy
import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minitri.errors import InputError, shorten
from minitri.model.linear import Linear, TiedHead
from minitri.model.llama import Llama
from minitri.roofline import eight_bit_bytes

FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
NUMBERS_AT_ONCE = 1 << 24
"""Weights that are quantized at a time: what that takes besides."""

TOLERANCE = 0.02
"""Largest error of a kernel, as a share of the largest result: what bfloat16 explains."""

Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]
"""scales * x W^T, (..., N), from x (..., E), W (N, E) of 8 bits and scales (N,)."""


class EightBitLinear(Linear):
    """y = x W^T + b with W in 8 bits."""

    def __init__(self, plain: Linear, form: torch.dtype, multiply: Multiply) -> None:
        """Another layer's shape and bias, its weights rounded."""
        nn.Module.__init__(self)
        self.out_features, self.bias, self.multiply = plain.out_features, plain.bias, multiply
        weight_NE, scales_N = quantize(plain.weight, form)
        self.weight = nn.Parameter(weight_NE, requires_grad=False)
        self.scales = nn.Parameter(scales_N, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.multiply(x, self.weight, self.scales)
        return y if self.bias is None else y + self.bias


def quantize(weight_NE: Tensor, form: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits, and the scale of each row, by which its largest number is met."""
    most = 127 if form == torch.int8 else torch.finfo(form).max
    quants_NE = torch.empty_like(weight_NE, dtype=form)
    scales_N = torch.empty(len(weight_NE), device=weight_NE.device)
    num_rows = max(1, NUMBERS_AT_ONCE // weight_NE.shape[1])
    parts = (tensor.split(num_rows) for tensor in (weight_NE, quants_NE, scales_N))
    for weight, quants, scales in zip(*parts, strict=True):
        scales.copy_(weight.abs().amax(1).float().div_(most).clamp_min_(1e-30))
        rows = weight.float() / scales.unsqueeze(1)
        quants.copy_(rows.round_() if form == torch.int8 else rows.clamp_(-most, most))
    return quants_NE, scales_N


def multiply_math(x: Tensor, weight_NE: Tensor, scales_N: Tensor) -> Tensor:
    """The plain formula: the oracle of the kernel."""
    return (x.float() @ weight_NE.float().T * scales_N).to(x.dtype)


def eight_bit_copy(model: Llama, name: str) -> Llama:
    """A copy of a model with linear layers in a format of `FORMATS`; it shares the rest.

    Weights are read and rounded layer by layer. Raises `InputError` if the device cannot compute
    with the format, or has no room.
    """
    form = FORMATS[name]
    multiply = multiply_math if model.device.type == "cpu" else _kernel(model, name)
    try:
        twin = _copy(model, form, multiply)
    except torch.OutOfMemoryError:
        raise InputError(
            f"--draft-weights {name} needs {eight_bit_bytes(model.config) / 2**30:.2f} GiB more on "
            f"{model.device} than are free; leave it out"
        ) from None
    assert isinstance(twin, Llama)
    twin.lent_embedding = model.embed
    shared = {id(weight) for weight in model.parameters()}
    twin.num_bytes = sum(w.nbytes for w in twin.parameters() if id(w) not in shared)
    return twin


def _copy(module: nn.Module, form: torch.dtype, multiply: Multiply) -> nn.Module:
    if isinstance(module, Linear) and type(module) in (Linear, TiedHead):
        return EightBitLinear(module, form, multiply)
    twin = copy.copy(module)
    children = module.named_children()
    twin._modules = {name: _copy(child, form, multiply) for name, child in children}
    return twin


def _kernel(model: Llama, name: str) -> Multiply:
    """The kernel for a model's device, tried there on rows of a small matrix."""
    try:
        from minitri.gpu.kernels.weights import multiply

        processors = torch.cuda.get_device_properties(model.device).multi_processor_count
        kernel = functools.partial(multiply, num_processors=processors)
        x = torch.randn(35, 640, generator=torch.Generator().manual_seed(0))
        x = x.to(model.device, model.dtype)
        matrix = quantize(x, FORMATS[name])
        exact = multiply_math(x, *matrix)
        with warnings.catch_warnings(action="ignore"):  # a compiler's, of its own code
            error = sum(float((kernel(x[:M], *matrix) - exact[:M]).abs().max()) for M in (3, 35))
        reason = "" if error <= TOLERANCE * float(exact.max()) else f"it is off by {error:.2g}"
    except Exception as failure:  # a compiler of kernels may raise anything
        reason = shorten(failure, 90)
    if reason:
        others = "use int8, or leave it out" if name == "fp8" else "leave it out"
        raise InputError(
            f"--draft-weights {name} does not work on {model.device} ({reason}); {others}"
        )
    return kernel
