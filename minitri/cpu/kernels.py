"""The compiled kernels of a CPU as functions on tensors; the C++ files say what they compute.

All kernels of a pass are row-invariant: the bits of a row depend neither on the other rows of the
block nor on the number of threads. Steps and chunks of prompts wait for each other, since PyTorch's
number of threads is one for the process.

Legend: B batch, T tokens, S slots, K KV heads, D head dim, R rows, E in_features, N out_features.
"""

import contextlib
import ctypes
import functools
import os
import struct
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from minitri.cpu.build import SOURCE, load_library
from minitri.errors import shorten
from minitri.log import log

MAX_HEAD_DIM = 1024
LOADING = threading.Lock()
"""All engines of a process have the same kernels, also if they are loaded at the same time."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as the kernels number them


class Kernels:
    """The functions of a shared library."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self.library = library
        library.minitri_instructions.restype = ctypes.c_char_p
        self.instructions = library.minitri_instructions().decode()
        """The processor's, as far as the kernels use them."""
        self.num_threads = num_threads
        self.seconds: Tensor | None = None
        """Two float64, for a profile: what linear layers and attention of passes take."""
        self._one_at_a_time = threading.RLock()
        os.register_at_fork(after_in_child=self._begin_in_child)

    def _begin_in_child(self) -> None:
        """Threads do not survive a fork: PyTorch would wait for them; a held lock stays held."""
        self.num_threads = 1
        self._one_at_a_time = threading.RLock()
        torch.set_num_threads(1)

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """One thread for PyTorch: its operations on a few rows gain nothing by more, and its
        threads, which spin for a while when they are done, would be in the way of the kernels'."""
        with self._one_at_a_time:
            torch.set_num_threads(1)
            try:
                yield
            finally:
                torch.set_num_threads(self.num_threads)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """All threads for PyTorch, in a thread that came up during a step, too."""
        with self._one_at_a_time:
            torch.set_num_threads(self.num_threads)
            yield

    def attend(
        self,
        q_BTHD: Tensor,
        keys_BKSD: Tensor,
        values_BKSD: Tensor,
        prefix_lengths: list[int],
        rule_TT: Tensor | None = None,
        lengths_B: Tensor | None = None,  # noqa: ARG002 (the contract's)
        *,
        is_short: bool = False,
    ) -> Tensor:
        """See `Attend`; row-invariant, among blocks computed as short ones and among all others."""
        B, T, H, D = q_BTHD.shape
        assert q_BTHD.stride(3) == keys_BKSD.stride(3) == 1
        assert keys_BKSD.stride() == values_BKSD.stride()
        out_BTHD = torch.empty(B, T, H, D, dtype=q_BTHD.dtype)
        lengths = torch.tensor(prefix_lengths)
        rule_TT = rule_TT.contiguous() if rule_TT is not None else None
        arguments = struct_of(
            *(q_BTHD, keys_BKSD, values_BKSD, out_BTHD, lengths, rule_TT),
            *(B, T, H, keys_BKSD.shape[1], D),
            *(*q_BTHD.stride()[:3], *keys_BKSD.stride()[:3], self.num_threads),
        )
        self.library.minitri_attention(DTYPES[q_BTHD.dtype], is_short, arguments)
        return out_BTHD

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bits: int = 16,
        *,
        bias: Tensor | None = None,
        is_wide: bool = False,
    ) -> Tensor:
        """x W^T + bias, (..., N); `is_wide`: in float32, in which sums are in any case.

        `weight` is (N, E) in the dtype of x, or with 4 or 8 `bits` what `quantized.py` makes of it.
        """
        x = x.contiguous()
        E = x.shape[-1]
        N = len(weight)
        out = x.new_empty(*x.shape[:-1], N, dtype=torch.float32 if is_wide else x.dtype)
        norm = residual = is_gated = eps = None
        arguments = struct_of(
            *(x, norm, weight, bias, residual, out),
            *(x.numel() // E, E, N, is_gated, is_wide, self.num_threads, eps),
        )
        self.library.minitri_linear(DTYPES[x.dtype], bits, arguments)
        return out

    def rotate(self, x_BTHD: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """Rotates the first heads of each token, a slice of (B, T, heads, D); see `Rotary`."""
        B, T, H, D = x_BTHD.shape
        out_BTHD = torch.empty(B, T, H, D, dtype=x_BTHD.dtype)
        sizes = (B * T, x_BTHD.stride(1) // D, H, D)
        arguments = struct_of(x_BTHD, cos, signed_sin, out_BTHD, *sizes)
        self.library.minitri_rotate(DTYPES[x_BTHD.dtype], arguments)
        return out_BTHD


def struct_of(*fields: Tensor | float | None) -> bytes:
    """A struct: addresses (the tensors must outlive it) and numbers, 8 bytes each."""
    words = [it.data_ptr() if isinstance(it, Tensor) else it or 0 for it in fields]
    return struct.pack("".join("d" if isinstance(it, float) else "q" for it in words), *words)


def load_kernels() -> Kernels | None:
    """The kernels, built for this machine if need be, with as many threads as PyTorch has now.

    None, with a warning, if that fails, or if the environment says MINITRI_KERNELS=off."""
    with LOADING:
        return _load_once()


@functools.cache
def _load_once() -> Kernels | None:
    if os.environ.get("MINITRI_KERNELS") == "off":
        return None
    try:
        return Kernels(load_library(SOURCE), torch.get_num_threads())
    except OSError as error:
        advice = "decoding takes twice as long; name a C++ compiler in CXX"
        log.warning("no compiled CPU kernels (%s): %s", shorten(error), advice)
        return None
