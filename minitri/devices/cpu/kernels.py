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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitri.core.decoding.verification import Guesses, Rule, Verdict, verify_block
from minitri.core.errors import shorten
from minitri.core.log import log
from minitri.core.model.cache import Slots, plain_slots
from minitri.core.settings import SamplingParams
from minitri.devices.cpu import abi
from minitri.devices.cpu.build import architecture, load_library
from minitri.devices.cpu.quantized import GROUP, Form, packed_shape
from minitri.devices.cpu.tiles import COLUMNS, Tiles, tiled_slots

MAX_HEAD_DIM = 1024
LOADING = threading.Lock()  # all engines of a process share the kernels
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # numbers of dtypes in C++
VERDICT_DTYPES = [torch.float32] * 2 + [torch.float64] + [torch.int64] * 2  # inputs of `verify`
BLOCK = 64  # slots whose scores are computed at once; a cache in tiles has a multiple of it


class Kernels:
    """The compiled CPU kernels: functions of a shared library, called with tensors."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        abi.check_sizes(library)
        self.library = library
        library.minitri_instructions.restype = ctypes.c_char_p
        self.instructions = library.minitri_instructions().decode()  # name of the instruction set
        self.paired = torch.bfloat16 if "BF16" in self.instructions else None
        """The dtype of which a vector lane multiplies two numbers at once, or None: no dtype."""
        self.num_threads = num_threads
        self._one_at_a_time = threading.RLock()
        os.register_at_fork(after_in_child=self._begin_in_child)

    def has_products(self, dtype: torch.dtype, form: int) -> bool:
        """Whether kernels, not PyTorch, multiply many rows of a dtype with weights of this `Form`.
        False in bfloat16 if the CPU multiplies that, and weights are plain or the CPU has AMX."""
        return dtype != self.paired or (form != Form.PLAIN and "AMX" not in self.instructions)

    def _begin_in_child(self) -> None:
        """Called in a forked child: resets threads, and a lock that nobody there may release."""
        self.num_threads = 1
        self._one_at_a_time = threading.RLock()
        torch.set_num_threads(1)

    @contextlib.contextmanager
    def threads(self, count: int = 0) -> Iterator[None]:
        """Context, held by one thread at a time, in which PyTorch uses `count` threads; 0: all.
        Reading of prompts uses all, decoding 1, as more would compete with the kernels' threads.
        At the end the calling thread has as many as before."""
        with self._one_at_a_time:
            before = torch.get_num_threads()
            torch.set_num_threads(count or self.num_threads)
            try:
                yield
            finally:
                torch.set_num_threads(before)

    def attend(
        self,
        q_BTHD: Tensor,
        keys_BKSD: Slots,
        values_BKSD: Slots,
        prefix_lengths: list[int],
        mask_TT: Tensor | None = None,
        lengths_B: Tensor | None = None,  # noqa: ARG002 (part of the contract)
        *,
        is_short: bool = False,
    ) -> Tensor:
        """Attention (B, T, H, D) of row b's queries to its first `prefix_lengths[b]` slots and, of
        the T after them, those in `mask_TT` (None: causal). Ignores `lengths_B`. Slots are summed
        in pieces if `is_short`, as in a short pass. A row's bits do not depend on other rows."""
        q_BTHD = q_BTHD.contiguous()
        out_BTHD = torch.empty_like(q_BTHD)
        *_, H, D = q_BTHD.shape
        arguments = abi.AttentionArguments(q=q_BTHD, out=out_BTHD, H=H)
        self.set_slots(arguments, q_BTHD, (keys_BKSD, values_BKSD), prefix_lengths, mask_TT)
        is_grouped = H % arguments.K == 0 and arguments.D == D
        require(is_grouped, tensors=(q_BTHD, memory_of(keys_BKSD)))
        self.call("attention", arguments, q_BTHD.dtype, is_short)
        return out_BTHD

    def set_slots(
        self,
        arguments: abi.Struct,
        x: Tensor,
        slots: Sequence[Slots],
        lengths: list[int],
        mask_TT: Tensor | None = None,
    ) -> None:
        """Sets the fields of `arguments` about a cache, and B and T of new tokens' x (B, T, ...).
        `slots`: keys, values, perhaps keys before RoPE; `lengths`: each row's cached tokens."""
        keys = slots[0]
        B, T = x.shape[:2]
        *_, num_rows, K, S, D = keys.shape
        *_, arguments.kv_batch, arguments.kv_head, arguments.kv_slot, number = keys.stride()
        like = (type(keys), keys.shape, keys.stride(), x.dtype)
        require(
            *((type(part), part.shape, part.stride(), part.dtype) == like for part in slots),
            number == 1 and D <= MAX_HEAD_DIM and len(lengths) == B <= num_rows,
            0 <= min(lengths) <= max(lengths) <= S - T,
            mask_TT is None or (mask_TT.shape, mask_TT.dtype) == ((T, T), torch.bool),
            tensors=(x, mask_TT, *map(memory_of, slots)),
        )
        arguments.fill(keys=memory_of(keys), values=memory_of(slots[1]), B=B, T=T, K=K, D=D)
        arguments.fill(lengths=torch.tensor(lengths), is_tiled=isinstance(keys, Tiles))
        arguments.mask = None if mask_TT is None else mask_TT.contiguous()

    def make_slots(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> tuple[Slots, Slots]:
        """Empty keys, values (..., S, D): `Tiles` if 64 divides S and 32 D, else plain tensors."""
        *_, S, D = shape
        if D % COLUMNS == S % BLOCK == 0:
            return tiled_slots(shape, dtype, 1 + (dtype == self.paired))
        return plain_slots(shape, dtype, device)

    def dequantize(
        self,
        packed_NX: Tensor,
        N: int,
        E: int,
        form: int,
        dtype: torch.dtype,
        rows_R: Tensor | None = None,
    ) -> Tensor:
        """Dequantizes a matrix of `Form` `form`, through float32: (N, E), or its rows `rows_R`."""
        require(
            is_matrix(packed_NX, N, E, form) and (rows_R is None or are_rows(rows_R, N)),
            tensors=(packed_NX, rows_R),
        )
        out_NE = torch.empty(N if rows_R is None else len(rows_R), E, dtype=dtype)
        arguments = abi.ConvertArguments(
            weights=packed_NX, rows=rows_R, out=out_NE, N=len(out_NE), E=E
        )
        self.call("dequantize", arguments, dtype, form)
        return out_NE

    def repack(
        self, blocks_NX: np.ndarray, form: int, rows_R: Tensor, place_RX: Tensor, E: int
    ) -> None:
        """Converts rows `rows_R` of a GGUF file's matrix, with bytes `blocks_NX` and E columns, to
        the kernels' layout, in `place_RX`. `form` is the number of the matrix's `Form`."""
        N, row_bytes = blocks_NX.shape
        require(
            is_matrix(place_RX, len(rows_R), E, form),
            are_rows(rows_R, N) and blocks_NX.flags.c_contiguous,
            tensors=(place_RX, rows_R),
        )
        blocks = blocks_NX.ctypes.data  # no tensor, as PyTorch has no read-only ones
        arguments = abi.ConvertArguments(
            weights=blocks, rows=rows_R, out=place_RX, N=len(rows_R), E=E, row_bytes=row_bytes
        )
        self.call("repack", arguments, torch.float32, form)

    def probs(self, logits_NV: Tensor, params: SamplingParams) -> Tensor:
        """Distributions (N, V) of float32 logits after temperature, top-k, top-p and min-p."""
        require(logits_NV.dtype == torch.float32, logits_NV.dim() == 2, tensors=(logits_NV,))
        logits_NV = logits_NV.contiguous()
        probs_NV = torch.empty_like(logits_NV)
        N, V = logits_NV.shape
        arguments = filters_of(params, logits=logits_NV, probs=probs_NV, N=N, V=V)
        self.call("filter", arguments, logits_NV.dtype)
        return probs_NV

    def verify(self, p_BNV: Tensor, uniforms_BN: Tensor, guesses: Guesses, rule: Rule) -> Verdict:
        """Tests guesses (B, N) by `rule`, which is `verify` or `verify_block`, with the verifier's
        p, B rows of N + 1, and float64 uniforms; returns accepted counts and next tokens."""
        arguments, verdict = verify_arguments(p_BNV, uniforms_BN, guesses)
        self.call("verify", arguments, p_BNV.dtype, rule is verify_block)
        return verdict

    def call(self, kernel: str, arguments: abi.Struct, dtype: torch.dtype, option: int = 0) -> None:
        """Runs C++ `kernel`, a KERNEL of kernels.cpp, on `dtype`; `option`: a `Form` or a flag.
        Raises `MemoryError` or `RuntimeError`."""
        function = getattr(self.library, f"minitri_{kernel}")
        code = function(DTYPES[dtype], option, self.num_threads, ctypes.byref(arguments))
        if code == 1:
            raise MemoryError("a CPU kernel has no memory for its scratch; shorten the prompt")
        if code:
            raise RuntimeError("the CPU kernels cannot start a thread; raise ulimit -u")


def require(*facts: bool, tensors: Sequence[Tensor | None]) -> None:
    """Raises `ValueError` unless `facts` hold, and `tensors` are on a CPU; kernels do not check."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not all(facts) or not all(tensor.is_cpu for tensor in given):
        seen = "; ".join(f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}" for x in given)
        raise ValueError(f"the CPU kernels cannot take {seen}; give what their docstrings say")


def is_matrix(weight: Tensor, N: int, E: int, form: int, dtype: torch.dtype | None = None) -> bool:
    """Whether kernels can read a tensor as a matrix (N, E) of this `Form`, of `dtype` if plain."""
    is_plain = form == Form.PLAIN
    wanted = (dtype, N, E) if is_plain else (torch.uint8, *packed_shape(N, E, form))
    is_whole = weight.is_contiguous() and (is_plain or E % GROUP == 0)
    return is_whole and (weight.dtype, *weight.shape) == wanted


def are_rows(rows_R: Tensor, N: int) -> bool:
    """Whether a tensor has valid row numbers of a matrix with N rows."""
    first, last = map(int, rows_R.aminmax())
    return rows_R.dtype == torch.int64 and rows_R.is_contiguous() and 0 <= first <= last < N


def memory_of(slots: Slots) -> Tensor:
    """The tensor that stores `slots`: the units of `Tiles`, or a plain tensor itself."""
    return slots.units if isinstance(slots, Tiles) else slots


def verify_arguments(
    p_BNV: Tensor, uniforms_BN: Tensor, guesses: Guesses
) -> tuple[abi.VerifyArguments, Verdict]:
    """Arguments of the kernel that tests guesses, and the verdict that it fills."""
    tokens_BN, q_BNV, counts_B = guesses
    B, N, V = q_BNV.shape
    tensors = [p_BNV, q_BNV, uniforms_BN, tokens_BN, counts_B]
    require(
        [x.shape for x in tensors] == [(B, N + 1, V), (B, N, V), (B, N + 1), (B, N), (B,)],
        [x.dtype for x in tensors] == VERDICT_DTYPES,
        all(x.is_contiguous() for x in tensors) and all(0 <= n <= N for n in counts_B.tolist()),
        tensors=tensors,
    )
    verdicts_B3 = torch.empty(B, 3, dtype=torch.int64)
    arguments = abi.VerifyArguments(p=p_BNV, q=q_BNV, uniforms=uniforms_BN, B=B, N=N, V=V)
    arguments.fill(tokens=tokens_BN, counts=counts_B, verdicts=verdicts_B3)
    return arguments, Verdict(*verdicts_B3.unbind(1))


def filters_of(params: SamplingParams, **fields: Any) -> abi.FilterArguments:
    """Arguments of the filter kernel: temperature, top-k, top-p, min-p, and the given `fields`."""
    temperature, top_p, log_min_p = params.numbers
    return abi.FilterArguments(
        temperature=temperature, top_k=params.top_k, top_p=top_p, log_min_p=log_min_p, **fields
    )


def load_kernels() -> Kernels | None:
    """The compiled CPU kernels, built if necessary, with as many threads as PyTorch has now.
    None if MINITRI_KERNELS=off, or, with a warning, if the build fails. Raises `InputError`."""
    with LOADING:
        return _load_once()


@functools.cache
def _load_once() -> Kernels | None:
    if os.environ.get("MINITRI_KERNELS") == "off":
        return None
    architecture()
    try:
        return Kernels(load_library(), torch.get_num_threads())
    except OSError as error:
        advice = "decoding takes twice as long; name a C++ compiler in CXX"
        log.warning("no compiled CPU kernels (%s): %s", shorten(error), advice)
        return None
