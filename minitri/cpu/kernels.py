"""The compiled kernels of a CPU as functions on tensors; `kernels.cpp` says what they compute.

They are built for this machine when they are first needed (`build.py`). Where that cannot be done,
or MINITRI_KERNELS=off is set, `load_kernels` gives None, and PyTorch's own operations do the work.

All kernels of a pass are row-invariant: the bits of a row of the result do not depend on the other
rows of the block, nor on the number of threads.

Legend: B batch, T tokens of a block, S slots, K KV heads, H query heads, D head dim, R rows, E
in_features, N out_features.
"""

import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from minitri.cpu.build import BuildError, shared_library
from minitri.errors import shorten
from minitri.settings import LONGEST_BLOCK

log = logging.getLogger("minitri")

SOURCE = Path(__file__).with_name("kernels.cpp")

MAX_HEAD_DIM = 1024

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Number types by their numbers in the kernels."""


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "out", "lengths", "rule")),
        *((name, ctypes.c_int64) for name in ("B", "T", "H", "K", "D")),
        *((name, ctypes.c_int64) for name in ("q_batch", "q_token", "q_head")),
        *((name, ctypes.c_int64) for name in ("kv_batch", "kv_head", "kv_slot")),
    ]


class _Linear(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "norm", "weights", "bias", "residual", "out")),
        *((name, ctypes.c_int64) for name in ("R", "E", "N", "is_gated", "is_wide")),
        ("eps", ctypes.c_double),
    ]


class Matrix(ctypes.Structure):
    """Weights and bias of a linear layer."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
        *((name, ctypes.c_int64) for name in ("N", "E", "bits")),
    ]


class LayerWeights(ctypes.Structure):
    """Where the weights of a transformer block are."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, Matrix) for name in ("qkv", "o", "gate_up", "down")),
    ]


class PassArguments(ctypes.Structure):
    """A pass of all layers; its fields are explained in `kernels.cpp`."""

    _fields_ = [
        ("layers", ctypes.POINTER(LayerWeights)),
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "keys", "values", "raw_keys")),
        *((name, ctypes.c_void_p) for name in ("queries", "lengths", "rule")),
        *((name, ctypes.c_int64) for name in ("L", "B", "T", "W", "E", "H", "K", "D")),
        *((name, ctypes.c_int64) for name in ("kv_layer", "kv_batch", "kv_head", "kv_slot")),
        ("eps", ctypes.c_double),
        ("seconds", ctypes.POINTER(ctypes.c_double)),
    ]


class Kernels:
    """The functions of a shared library."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` if it cannot be loaded, `AttributeError` if a function is missing."""
        library = ctypes.CDLL(str(path))
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        self._set_threads = library.minitri_set_threads
        self._attention = library.minitri_attention
        self._linear = library.minitri_linear
        self._rotate = library.minitri_rotate
        self._pass = library.minitri_pass
        self._rotate.argtypes = [ctypes.c_int, *[pointer] * 4, *[whole] * 4]
        for function in (self._attention, self._linear, self._rotate, self._pass):
            function.restype = None
        self._set_threads.restype = None
        library.minitri_instructions.restype = ctypes.c_char_p
        self.instructions: str = library.minitri_instructions().decode()
        """The processor's, as far as the kernels use them."""
        self._reads_prompt = False
        self.seconds: ctypes.Array[ctypes.c_double] | None = None
        """Two numbers, if a profile wants them: what linear layers and attention of passes take."""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """As many threads as PyTorch has for the kernels, and one for PyTorch meanwhile.

        Its operations on a few rows gain nothing by more, and its threads, which spin for a while
        when they are done, would be in the way of those of the kernels.
        """
        num_threads = torch.get_num_threads()
        self._set_threads(num_threads)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)

    @contextlib.contextmanager
    def reading_prompt(self) -> Iterator[None]:
        """Blocks of any length are computed like long ones meanwhile: to the bit, K and V do not
        depend on where the chunks of a prompt begin."""
        self._reads_prompt = True
        try:
            yield
        finally:
            self._reads_prompt = False

    def is_short(self, num_tokens: int) -> bool:
        """Whether a block of so many tokens is one of decoding; long ones are matrix
        multiplications."""
        return num_tokens <= LONGEST_BLOCK and not self._reads_prompt

    def attend(
        self, q_BTHD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, prefix_lengths: list[int],
        rule_TT: Tensor | None = None, lengths_B: Tensor | None = None,  # noqa: ARG002 (contract)
    ) -> Tensor:  # fmt: skip
        """Attention of a block; the contract is `model.attention.Attend`.

        Row-invariant among short blocks, and among long ones.
        """
        B, T, H, D = q_BTHD.shape
        assert q_BTHD.stride(3) == keys_BKSD.stride(3) == 1
        assert keys_BKSD.stride() == values_BKSD.stride()
        assert not (q_BTHD.requires_grad and torch.is_grad_enabled()), "kernels have no gradients"
        out_BTHD = torch.empty(B, T, H, D, dtype=q_BTHD.dtype)
        rule = rule_TT.contiguous() if rule_TT is not None else None
        lengths = (ctypes.c_int64 * B)(*prefix_lengths)
        arguments = _Attention(
            q_BTHD.data_ptr(), keys_BKSD.data_ptr(), values_BKSD.data_ptr(), out_BTHD.data_ptr(),
            ctypes.addressof(lengths), address(rule),
            B, T, H, keys_BKSD.shape[1], D, *q_BTHD.stride()[:3], *keys_BKSD.stride()[:3],
        )  # fmt: skip
        self._attention(DTYPES[q_BTHD.dtype], self.is_short(T), ctypes.byref(arguments))
        return out_BTHD

    def linear(
        self, x: Tensor, weight: Tensor, out_features: int, *, bits: int = 16,
        bias: Tensor | None = None, residual: Tensor | None = None, norm: Tensor | None = None,
        eps: float = 0.0, is_gated: bool = False, is_wide: bool = False,
    ) -> Tensor:  # fmt: skip
        """x W^T + bias + residual, (..., N); with `norm`, its weights, of the RMSNorm of x.

        `weight` is (N, E) in the dtype of x, or with 4 or 8 `bits` what `quantized.py` makes of it.
        `is_gated`: W holds a gate and an up projection, and the result is silu(gate) * up, of N / 2
        numbers. `is_wide`: the result is float32. Sums are float32 in any case.
        """
        assert not (x.requires_grad and torch.is_grad_enabled()), "kernels have no gradients"
        assert residual is None or residual.is_contiguous()
        x = x.contiguous()
        E = x.shape[-1]
        out = torch.empty(
            *x.shape[:-1],
            out_features // (1 + is_gated),
            dtype=torch.float32 if is_wide else x.dtype,
        )
        arguments = _Linear(
            x.data_ptr(), address(norm), weight.data_ptr(), address(bias), address(residual),
            out.data_ptr(), x.numel() // E, E, out_features, is_gated, is_wide, eps,
        )  # fmt: skip
        self._linear(DTYPES[x.dtype], bits, ctypes.byref(arguments))
        return out

    def run_pass(self, dtype: torch.dtype, arguments: PassArguments) -> None:
        """All layers of a model over a short block, whose K and V are written into a cache."""
        if self.seconds is not None:
            arguments.seconds = self.seconds
        self._pass(DTYPES[dtype], ctypes.byref(arguments))

    def rotate(self, x_BTHD: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """Rotates the first heads of each token, a slice of contiguous (B, T, heads, D).

        `cos` and `signed_sin` are (B, T, 1, D) float32, as in `model.rope.Rotary`.
        """
        B, T, H, D = x_BTHD.shape
        out_BTHD = torch.empty(B, T, H, D, dtype=x_BTHD.dtype)
        self._rotate(
            DTYPES[x_BTHD.dtype], x_BTHD.data_ptr(), cos.data_ptr(), signed_sin.data_ptr(),
            out_BTHD.data_ptr(), B * T, x_BTHD.stride(1) // D, H, D,
        )  # fmt: skip
        return out_BTHD


def address(tensor: Tensor | None) -> int | None:
    """Where the numbers of a tensor are; None stands for null."""
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def load_kernels() -> Kernels | None:
    """The kernels, built for this machine if they are not yet; None, with a warning, if that fails.

    The environment variable MINITRI_KERNELS=off stands for no kernels.
    """
    if os.environ.get("MINITRI_KERNELS") == "off":
        return None
    try:
        kernels = Kernels(shared_library(SOURCE))
    except (BuildError, OSError, AttributeError) as error:
        log.warning("no compiled CPU kernels (%s); decoding takes twice as long", shorten(error))
        return None
    kernels._set_threads(torch.get_num_threads())
    return kernels
