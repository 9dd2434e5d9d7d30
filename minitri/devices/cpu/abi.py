"""Argument structs of the compiled CPU kernels: ctypes structures with the fields of the C++ ones.

A class and its fields have the names and the order of a struct in the C++ files, where comments
give shapes. Fields that are not set are 0 or null. A struct has only the addresses of tensors, so
its caller must keep them alive.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

POINTER = ctypes.c_void_p
INTEGER = ctypes.c_int64
DOUBLE = ctypes.c_double


def fields(kind: type, names: str) -> Sequence[tuple[str, Any]]:
    """Entries of `_fields_`: fields of one type, with these names."""
    return [(name, kind) for name in names.split()]


class Struct(ctypes.Structure):
    """Base class of all argument structs; a field set to a tensor gets the tensor's address."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field. Raises `AttributeError` if no field has this name."""
        getattr(self, name)
        super().__setattr__(name, value.data_ptr() if isinstance(value, Tensor) else value)

    fill = ctypes.Structure.__init__  # sets some fields, and leaves the others


class AttentionArguments(Struct):
    """Arguments of the C++ kernel for attention of a block to a cached prefix and itself."""

    _fields_ = [
        *fields(POINTER, "q keys values out lengths rule"),
        *fields(INTEGER, "B T H K D q_batch q_token q_head kv_batch kv_head kv_slot"),
        *fields(INTEGER, "is_tiled num_threads"),
    ]


class LinearArguments(Struct):
    """Arguments of the C++ kernel for a linear layer over a few rows."""

    _fields_ = [
        *fields(POINTER, "x norm weights bias residual out"),
        *fields(INTEGER, "R E N stride is_gated is_wide num_threads"),
        *fields(DOUBLE, "eps scale"),
    ]


class ProductArguments(Struct):
    """Arguments of the C++ kernel for a linear layer over many rows."""

    _fields_ = [*fields(POINTER, "x weights bias out"), *fields(INTEGER, "R E N num_threads")]


class ConvertArguments(Struct):
    """Arguments of the C++ kernels that dequantize rows of a matrix, or repack those of a file."""

    _fields_ = [*fields(POINTER, "weights rows out"), *fields(INTEGER, "N E row_bytes num_threads")]


class RotateArguments(Struct):
    """Arguments of the C++ kernel for RoPE of the first heads of each token."""

    _fields_ = [*fields(POINTER, "x cos sin out"), *fields(INTEGER, "R total H D")]


class NormArguments(Struct):
    """Arguments of the C++ kernel for RMSNorm."""

    _fields_ = [*fields(POINTER, "x weight out"), *fields(INTEGER, "R E"), ("eps", DOUBLE)]


class FilterArguments(Struct):
    """Arguments of the C++ kernel for temperature, top-k, top-p and min-p."""

    _fields_ = [
        *fields(POINTER, "logits probs"),
        *fields(INTEGER, "N V top_k num_threads"),
        *fields(DOUBLE, "temperature top_p log_min_p"),
    ]


class Matrix(Struct):
    """Addresses of a linear layer's weights and bias, for the C++ kernels."""

    _fields_ = [*fields(POINTER, "weights bias"), *fields(INTEGER, "N E form")]


class LayerWeights(Struct):
    """Addresses of a transformer block's weights, for the C++ kernels."""

    _fields_ = [
        *fields(POINTER, "input_norm post_norm q_norm k_norm"),
        ("is_unrotated", INTEGER),
        ("qkv", Matrix * 3),
        *fields(Matrix, "o gate_up down"),
    ]


class PassArguments(Struct):
    """Arguments of the C++ kernel for a pass of all layers of a model over a short block."""

    _fields_ = [
        *fields(POINTER, "layers x cos sin keys values raw_keys queries lengths rule"),
        *fields(INTEGER, "L B T W E H K D"),
        *fields(INTEGER, "kv_layer kv_batch kv_head kv_slot queries_layer is_tiled num_threads"),
        *fields(DOUBLE, "eps scale"),
        ("seconds", POINTER),
    ]


class RoundArguments(Struct):
    """Arguments of the C++ kernel for a draft model's round: a pass over a block, and N guesses."""

    _fields_ = [
        ("first", PassArguments),
        *fields(POINTER, "block num_read cos sin embeddings"),
        *fields(INTEGER, "num_tokens form"),
        ("norm", POINTER),
        ("head", Matrix),
        *fields(POINTER, "ids filters uniforms tokens probs"),
        *fields(INTEGER, "N width"),
    ]


def check_sizes(library: ctypes.CDLL) -> None:
    """Raises `OSError` if a struct has another size in the compiled library than here."""
    library.minitri_sizeof.restype = INTEGER
    for struct in Struct.__subclasses__():
        if library.minitri_sizeof(struct.__name__.encode()) != ctypes.sizeof(struct):
            raise OSError(f"{struct.__name__} has another size in C++ than in devices/cpu/abi.py")
