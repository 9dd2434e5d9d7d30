"""Argument structs of the compiled CPU kernels: ctypes structures with the fields of the C++ ones.

A class and its fields have the names and the order of a struct in the C++ files, where comments
give shapes. Fields that are not set are 0 or null.
"""

import ctypes
from typing import Any

from torch import Tensor

KINDS = {"pointers": ctypes.c_void_p, "integers": ctypes.c_int64, "doubles": ctypes.c_double}


def layout(**names: str) -> list[tuple[str, Any]]:
    """Entries (name, type) for ctypes' `_fields_`, in the order of the C++ struct. A keyword is
    pointers, integers or doubles; its text has names of such fields, separated by spaces."""
    return [(name, KINDS[kind]) for kind, text in names.items() for name in text.split()]


class Struct(ctypes.Structure):
    """Base class of argument structs: a tensor is stored as its address, an unknown name fails."""

    def __setattr__(self, name: str, value: Any) -> None:
        getattr(self, name)
        if not isinstance(value, int):
            super().__setattr__(f"_{name}", value)  # keeps tensors alive, also those of a struct
        super().__setattr__(name, value.data_ptr() if isinstance(value, Tensor) else value)

    fill = ctypes.Structure.__init__  # sets the fields given as keywords, leaves the others


class AttentionArguments(Struct):
    """Arguments of the C++ attention kernel; kv_*: strides of K and V, `Tiles` if is_tiled."""

    _fields_ = layout(
        pointers="q keys values out lengths mask",
        integers="B T H K D kv_batch kv_head kv_slot is_tiled",
    )


class LinearArguments(Struct):
    """Arguments of the C++ kernels for linear layers: x (R, E), out (R, N). If given, an RMSNorm
    comes before, scale and residual after; is_gated: SwiGLU, is_wide: out is float32."""

    _fields_ = layout(
        pointers="x norm weights bias residual out",
        integers="R E N stride is_gated is_wide",
        doubles="eps scale",
    )


class ConvertArguments(Struct):
    """Arguments of the C++ kernels that dequantize N rows of a matrix, or repack a GGUF file's."""

    _fields_ = layout(pointers="weights rows out", integers="N E row_bytes")


class FilterArguments(Struct):
    """Arguments of the C++ kernel for temperature, top-k, top-p and min-p of logits (N, V)."""

    _fields_ = layout(
        pointers="logits probs", integers="N V top_k", doubles="temperature top_p log_min_p"
    )


class VerifyArguments(Struct):
    """Arguments of the C++ kernel that tests row b's `counts[b]` guesses of `tokens` (B, N)."""

    _fields_ = layout(pointers="p q uniforms tokens counts verdicts", integers="B N V")


class Matrix(Struct):
    """Addresses of a linear layer's weights (N, E) and bias for the C++ kernels, and its `Form`."""

    _fields_ = layout(pointers="weights bias", integers="N E form")


class LayerWeights(Struct):
    """Addresses of a transformer block's weights, for the C++ kernels."""

    _fields_ = [
        *layout(pointers="input_norm post_norm q_norm k_norm", integers="is_unrotated"),
        ("qkv", Matrix * 3),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    ]


class PassArguments(AttentionArguments):
    """Arguments of the C++ kernel for a pass of L layers, or of `first` alone, over x, in place.
    kv_layer and queries_layer are strides; queries gets rotated ones of the last W tokens."""

    _fields_ = layout(
        pointers="layers x cos sin raw_keys queries",
        integers="L W E first kv_layer queries_layer",
        doubles="eps scale",
    )


class RoundArguments(Struct):
    """Arguments of the C++ kernel that reads `block` by the pass `first`, for P outputs per row:
    logits, probs by `filters`, a verdict about `guesses`; or samples N `tokens` by `numbers`."""

    _fields_ = [
        ("first", PassArguments),
        *layout(pointers="block cos sin norm"),
        ("table", Matrix),
        ("head", Matrix),
        *layout(pointers="ids filters numbers tokens logits probs"),
        ("guesses", VerifyArguments),
        *layout(integers="N P positions V width is_coupled"),
    ]


def check_sizes(library: ctypes.CDLL) -> None:
    """Raises `OSError` if a struct has another size in the compiled library than here."""
    library.minitri_sizeof.restype = ctypes.c_int64
    for struct in [*Struct.__subclasses__(), *AttentionArguments.__subclasses__()]:
        if library.minitri_sizeof(struct.__name__.encode()) != ctypes.sizeof(struct):
            raise OSError(f"{struct.__name__} has another size in C++ than in devices/cpu/abi.py")
