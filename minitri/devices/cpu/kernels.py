"""Compiled CPU kernels as functions on tensors.

All kernels of a pass are row-invariant: a row's bits depend neither on other rows nor on threads.
Decoding and reading of prompts wait for each other, as both set PyTorch's number of threads.

Legend: B rows, T tokens, S slots, K/H heads, D dim, R rows, E inputs, N outputs, V vocab, X bytes.
"""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import RMSNorm

from minitri.core.errors import shorten
from minitri.core.log import log
from minitri.core.model.cache import Slots, plain_slots
from minitri.core.settings import SamplingParams
from minitri.devices.cpu import abi
from minitri.devices.cpu.build import SOURCE, architecture, load_library
from minitri.devices.cpu.quantized import GROUP, Form, packed_shape
from minitri.devices.cpu.tiles import COLUMNS, PANEL, Tiles, tiled_slots

MAX_HEAD_DIM = 1024
LOADING = threading.Lock()  # all engines of a process share the kernels
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # numbers of dtypes in C++
BLOCK = 64  # slots whose scores are computed at once; a cache in tiles has a multiple of it


class Kernels:
    """The compiled CPU kernels: functions of a shared library, called with tensors."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        abi.check_sizes(library)
        self.library = library
        library.minitri_instructions.restype = ctypes.c_char_p
        self.instructions = library.minitri_instructions().decode()  # name of the instruction set
        has_pairs = self.instructions.startswith("AVX-512 BF16")
        self.pairs = dict.fromkeys(DTYPES, 1) | {torch.bfloat16: 1 + has_pairs}
        """By dtype how many numbers a vector lane multiplies at once; see `tiled_slots`."""
        self.num_threads = num_threads
        self.seconds: Tensor | None = None  # of linear layers and of attention, for a profile
        self._one_at_a_time = threading.RLock()
        os.register_at_fork(after_in_child=self._begin_in_child)

    def has_products(self, dtype: torch.dtype, form: int) -> bool:
        """Whether kernels multiply many rows with weights of this form faster than PyTorch, or, as
        those in few bits are dequantized for it, hardly slower, and few rows much faster."""
        return self.pairs[dtype] == 1 or (form != Form.PLAIN and "AMX" not in self.instructions)

    def _begin_in_child(self) -> None:
        """Called in a forked child: resets threads, and a lock that nobody there may release."""
        self.num_threads = 1
        self._one_at_a_time = threading.RLock()
        torch.set_num_threads(1)

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """Context for steps: PyTorch uses one thread, as more would compete with the kernels."""
        with self._one_at_a_time:
            torch.set_num_threads(1)
            try:
                yield
            finally:
                torch.set_num_threads(self.num_threads)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Context for reading prompts: PyTorch uses all threads."""
        with self._one_at_a_time:
            torch.set_num_threads(self.num_threads)
            yield

    def attend(
        self,
        q_BTHD: Tensor,
        keys_BKSD: Slots,
        values_BKSD: Slots,
        prefix_lengths: list[int],
        rule_TT: Tensor | None = None,
        lengths_B: Tensor | None = None,  # noqa: ARG002 (the contract's)
        *,
        is_short: bool = False,
    ) -> Tensor:
        """Attention as `Attend` says; row-invariant among short blocks, and among long ones."""
        B, T, H, D = q_BTHD.shape
        K, S = keys_BKSD.shape[1:3]
        keys, values = map(memory_of, (keys_BKSD, values_BKSD))
        strides = keys_BKSD.stride()
        require(
            keys_BKSD.shape == values_BKSD.shape == (B, K, S, D) and H % K == 0,
            q_BTHD.dtype == keys_BKSD.dtype == values_BKSD.dtype and D <= MAX_HEAD_DIM,
            q_BTHD.stride(3) == strides[3] == 1,
            strides == values_BKSD.stride() and len(prefix_lengths) == B,
            min(prefix_lengths) >= 0 and max(prefix_lengths) + T <= S,
            rule_TT is None or (rule_TT.shape, rule_TT.dtype) == ((T, T), torch.bool),
            self.can_read((keys_BKSD, values_BKSD)),
            tensors=(q_BTHD, keys, values, rule_TT),
        )
        out = q_BTHD.new_empty(B, T, H, D)
        lengths = torch.tensor(prefix_lengths)
        rule = rule_TT.contiguous() if rule_TT is not None else None
        arguments = abi.AttentionArguments(q=q_BTHD, keys=keys, values=values, out=out)
        arguments.fill(lengths=lengths, rule=rule, num_threads=self.num_threads)
        arguments.fill(B=B, T=T, H=H, K=K, D=D, is_tiled=isinstance(keys_BKSD, Tiles))
        arguments.q_batch, arguments.q_token, arguments.q_head, _ = q_BTHD.stride()
        arguments.kv_batch, arguments.kv_head, arguments.kv_slot, _ = strides
        self.call("attention", arguments, q_BTHD.dtype, is_short)
        return out

    def make_slots(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> tuple[Slots, Slots]:
        """Keys and values (..., S, D), in tiles where the kernels can read them."""
        *_, S, D = shape
        if D % COLUMNS == S % PANEL == 0:  # slots fill whole tiles
            return tiled_slots(shape, dtype, self.pairs[dtype])
        return plain_slots(shape, dtype, device)

    def can_read(self, slots: Sequence[Slots]) -> bool:
        """Whether kernels can read these K and V: of one layout, in tiles that fit their dtype."""
        tiles = [part for part in slots if isinstance(part, Tiles)]
        has_layout = not tiles or tiles[0].pair == self.pairs[tiles[0].dtype]  # that of the keys
        is_whole = all(tile.shape[-2] % BLOCK == 0 for tile in tiles)
        return len(tiles) in (0, len(slots)) and is_whole and has_layout

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        form: int = Form.PLAIN,
        num_outputs: int | None = None,
        *,
        bias: Tensor | None = None,
        is_wide: bool = False,
        kernel: str = "linear",
    ) -> Tensor:
        """Linear layer x W^T + bias, (..., N), in the dtype of x, or float32 if `is_wide`. `weight`
        is (N, E) in x's dtype, or quantized as in `quantized.py`. The `kernel` "linear" is for few
        rows, "product" for many: with plain weights it sums over E in order, in float32. With
        either a row's bits depend neither on other rows nor on their number."""
        x = x.contiguous()
        E = x.shape[-1]
        N = num_outputs or len(weight)
        is_plain = form == Form.PLAIN
        wanted = (x.dtype, N, E) if is_plain else (torch.uint8, *packed_shape(N, E, form))
        require(
            (weight.dtype, *weight.shape) == wanted and weight.is_contiguous(),
            bias is None or (bias.dtype, *bias.shape, *bias.stride()) == (x.dtype, N, 1),
            is_plain or E % GROUP == 0,
            tensors=(x, weight, bias),
        )
        out = x.new_empty(*x.shape[:-1], N, dtype=torch.float32 if is_wide else x.dtype)
        arguments = abi.LinearArguments(x=x, weights=weight, bias=bias, out=out, is_wide=is_wide)
        arguments.fill(R=x.numel() // E, E=E, N=N, stride=N, num_threads=self.num_threads)
        self.call(kernel, arguments, x.dtype, form)
        return out

    def dequantize(
        self, packed_NX: Tensor, E: int, form: int, dtype: torch.dtype, rows_R: Tensor | None = None
    ) -> Tensor:
        """Dequantizes a matrix to (N, E), or its rows `rows_R` alone, computed in float32."""
        N = len(packed_NX)
        require(
            (packed_NX.dtype, *packed_NX.shape) == (torch.uint8, *packed_shape(N, E, form)),
            packed_NX.is_contiguous() and E % GROUP == 0,
            rows_R is None or (rows_R.dtype == torch.int64 and rows_R.is_contiguous()),
            rows_R is None or all(0 <= row < N for row in rows_R.tolist()),
            tensors=(packed_NX, rows_R),
        )
        out_NE = torch.empty(N if rows_R is None else len(rows_R), E, dtype=dtype)
        arguments = abi.ConvertArguments(weights=packed_NX, rows=rows_R, out=out_NE)
        arguments.fill(N=len(out_NE), E=E, num_threads=self.num_threads)
        self.call("dequantize", arguments, dtype, form)
        return out_NE

    def repack(
        self, blocks_NX: np.ndarray, form: int, rows_R: Tensor, place_RX: Tensor, E: int
    ) -> None:
        """Writes rows `rows_R` of a matrix (N, E), which a GGUF file stores in blocks of a format
        with this form, quantized as in `quantized.py` into `place_RX`."""
        N, row_bytes = blocks_NX.shape
        require(
            (place_RX.dtype, *place_RX.shape) == (torch.uint8, *packed_shape(len(rows_R), E, form)),
            place_RX.is_contiguous() and rows_R.is_contiguous() and rows_R.dtype == torch.int64,
            0 <= int(rows_R.min()) <= int(rows_R.max()) < N and blocks_NX.flags.c_contiguous,
            tensors=(place_RX, rows_R),
        )
        blocks = blocks_NX.ctypes.data  # PyTorch has no tensors that are only read
        arguments = abi.ConvertArguments(weights=blocks, rows=rows_R, out=place_RX)
        arguments.fill(N=len(rows_R), E=E, row_bytes=row_bytes, num_threads=self.num_threads)
        self.call("repack", arguments, torch.float32, form)

    def rotate(self, x_BTHD: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """RoPE of the first heads of each token, a slice of (B, T, heads, D); see `Rotary`."""
        B, T, H, D = x_BTHD.shape
        row, token, head, number = x_BTHD.stride()
        require(
            (head, number) == (D, 1) and token % D == D % 2 == 0,
            B == 1 or row == T * token,
            *((it.dtype, it.numel()) == (torch.float32, B * T * D) for it in (cos, signed_sin)),
            cos.is_contiguous() and signed_sin.is_contiguous(),
            tensors=(x_BTHD, cos, signed_sin),
        )
        out_BTHD = x_BTHD.new_empty(B, T, H, D)
        arguments = abi.RotateArguments(x=x_BTHD, cos=cos, sin=signed_sin, out=out_BTHD)
        arguments.fill(R=B * T, total=token // D, H=H, D=D)
        self.call("rotate", arguments, x_BTHD.dtype)
        return out_BTHD

    def probs(self, logits_NV: Tensor, params: SamplingParams) -> Tensor:
        """Distributions as by `probs_from_logits`, up to last bits, of float32 logits (N, V)."""
        require(logits_NV.dtype == torch.float32, logits_NV.dim() == 2, tensors=(logits_NV,))
        logits_NV = logits_NV.contiguous()
        probs_NV = torch.empty_like(logits_NV)
        N, V = logits_NV.shape
        arguments = abi.FilterArguments(logits=logits_NV, probs=probs_NV)
        set_filters(arguments, params)
        arguments.fill(N=N, V=V, num_threads=self.num_threads)
        self.call("filter", arguments, logits_NV.dtype)
        return probs_NV

    def call(self, kernel: str, arguments: abi.Struct, dtype: torch.dtype, option: int = 0) -> None:
        """Runs the kernel of this name. Raises `MemoryError` or `RuntimeError` if it fails."""
        function = getattr(self.library, f"minitri_{kernel}")
        code = function(DTYPES[dtype], option, ctypes.byref(arguments))
        if code == 1:
            raise MemoryError("a CPU kernel has no memory for its scratch; shorten the prompt")
        if code:
            raise RuntimeError("the CPU kernels cannot start a thread; raise ulimit -u")


class KernelNorm(RMSNorm):
    """RMSNorm before an LM head, by a compiled kernel."""

    def __init__(self, like: RMSNorm, kernels: Kernels) -> None:
        super().__init__(like.normalized_shape, like.eps)
        self.weight = like.weight
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        E = len(self.weight)
        require((*x.shape[-1:], x.dtype) == (E, self.weight.dtype), tensors=(x, self.weight))
        arguments = abi.NormArguments(x=x, weight=self.weight, out=out)
        arguments.fill(R=x.numel() // E, E=E, eps=self.eps)
        self.kernels.call("norm", arguments, x.dtype)
        return out


def require(*facts: bool, tensors: Sequence[Tensor | None]) -> None:
    """Raises `ValueError` unless all `facts` hold, without which kernels leave their bounds."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not all(facts) or not all(tensor.is_cpu for tensor in given):
        seen = "; ".join(f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}" for x in given)
        raise ValueError(f"the CPU kernels cannot take {seen}; give what their docstrings say")


def memory_of(slots: Slots) -> Tensor:
    """The tensor in whose memory `slots`, plain or in tiles, have their numbers."""
    return slots.units if isinstance(slots, Tiles) else slots


def set_filters(arguments: abi.FilterArguments, params: SamplingParams) -> None:
    """Sets temperature, top-k, top-p and min-p in the arguments of the filter kernel."""
    arguments.temperature, arguments.top_p, arguments.log_min_p = params.numbers
    arguments.top_k = params.top_k


def load_kernels() -> Kernels | None:
    """The compiled kernels, built if necessary, with PyTorch's current number of threads; None if
    MINITRI_KERNELS=off, or, after a warning, if the build fails. Raises `InputError`."""
    with LOADING:
        return _load_once()


@functools.cache
def _load_once() -> Kernels | None:
    if os.environ.get("MINITRI_KERNELS") == "off":
        return None
    architecture()
    try:
        return Kernels(load_library(SOURCE), torch.get_num_threads())
    except OSError as error:
        advice = "decoding takes twice as long; name a C++ compiler in CXX"
        log.warning("no compiled CPU kernels (%s): %s", shorten(error), advice)
        return None
