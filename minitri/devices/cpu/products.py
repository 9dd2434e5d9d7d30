"""Matrix products of many rows, as of prompts, by PyTorch or by a compiled kernel.

Legend: R rows, E in_features, N out_features.
"""

import os
import timeit
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache, partial
from pathlib import Path
from statistics import median
from tempfile import NamedTemporaryFile

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.core.errors import InputError
from minitri.core.settings import LONGEST_BLOCK
from minitri.devices.cpu.build import SOURCE, built_library
from minitri.devices.cpu.kernels import Kernels
from minitri.devices.cpu.packed import can_pack

TILE = 256  # rows of each product where the number of rows would change last bits
FASTER = 1.25  # the kernel is used if it is this many times as fast as PyTorch


def multiply_rows(
    kernels: Kernels, rows_RE: Tensor, weight_NE: Tensor, bias_N: Tensor | None
) -> Tensor:
    """Linear layer x W^T + b, (R, N), row-invariant: a row's bits do not depend on other rows."""
    if is_kernel_faster(kernels, weight_NE.dtype):
        return kernels.product(rows_RE, weight_NE, bias_N)
    R = len(rows_RE)
    tile = product_tile(weight_NE.dtype, *weight_NE.shape, torch.get_num_threads())
    tile = tile or max(R, LONGEST_BLOCK + 1)
    if R % tile:
        rows_RE = F.pad(rows_RE, (0, 0, 0, -R % tile))
    multiply = torch.mm if bias_N is None else partial(torch.addmm, bias_N)
    out_RN = rows_RE.new_empty(len(rows_RE), len(weight_NE))
    for part, out in zip(rows_RE.split(tile), out_RN.split(tile), strict=True):
        multiply(part, weight_NE.t(), out=out)
    return out_RN[:R]


@cache
def is_kernel_faster(kernels: Kernels, dtype: torch.dtype) -> bool:
    """Whether `Kernels.product` is faster than PyTorch on this machine: measured once and stored in
    a file next to the compiled kernels, so that all processes compute the same bits. False if no
    file can be stored, True for a dtype that oneDNN does not multiply on this CPU."""
    if dtype != torch.float32 and not can_pack(dtype, torch.device("cpu")):
        return True
    name = f"{str(dtype).removeprefix('torch.')}-{torch.__version__}-{kernels.num_threads}"
    with suppress(OSError, InputError):
        place = built_library(SOURCE).with_suffix(f".{name}")
        if not place.exists():
            publish(place, "kernel" if _measure(kernels, dtype) else "PyTorch")
        return place.read_text("utf-8", "replace") == "kernel"
    return False


def publish(place: Path, text: str) -> None:
    """Writes a file atomically, unless another process was first. Raises `OSError`."""
    with NamedTemporaryFile("w", dir=place.parent) as unfinished:
        unfinished.write(text)
        unfinished.flush()
        with suppress(FileExistsError):
            os.link(unfinished.name, place)


def _measure(kernels: Kernels, dtype: torch.dtype) -> bool:
    """Measures whether the kernel's product is `FASTER` times as fast as PyTorch's."""
    seeded = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 576, generator=seeded, dtype=dtype) for n in (TILE, 3 * TILE))
    with kernels.reading():
        seconds = _seconds(lambda: kernels.product(x, weight))
        return _seconds(lambda: F.linear(x, weight)) > FASTER * seconds


def _seconds(work: Callable[[], object]) -> float:
    """Median seconds of 7 runs of `work`, after one to warm up."""
    return median(timeit.repeat(work, number=1, repeat=8)[1:])


@lru_cache
def product_tile(dtype: torch.dtype, N: int, E: int, num_threads: int) -> int | None:  # noqa: ARG001 (a key)
    """Rows to multiply with a (N, E) matrix at a time, for products to be row-invariant; None: any
    number above LONGEST_BLOCK. With AMX, and in float32, oneDNN may sum few rows in another order
    than many; then K and V would depend on the chunks of a prompt. So the order is tested here."""
    seeded = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, E, generator=seeded, dtype=dtype) for n in (4 * TILE, N))
    many = F.linear(x, weight)
    few = (LONGEST_BLOCK + 1, TILE, 2 * TILE)
    is_same = all(torch.equal(F.linear(x[:rows], weight), many[:rows]) for rows in few)
    return None if is_same else TILE
