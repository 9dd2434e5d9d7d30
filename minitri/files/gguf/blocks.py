"""Matrices that a GGUF file has in quantized blocks: repacked for the CPU kernels, or dequantized.

A row of a matrix is a chain of blocks of 32 weights or, in K-quants, 256 (`devices/cpu/quantized.h`
has the formats). Repacking is exact: in Q4_0 and Q5_0, where a weight is d (q - 8) or d (q - 16),
the kernels' offset is -8 d or -16 d, which has the digits of d.

Legend: N rows, X bytes of a row of a repacked matrix.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minitri.devices.cpu.kernels import Kernels
from minitri.devices.cpu.quantized import PANEL, Form, packed_shape
from minitri.files.families import read_table

if TYPE_CHECKING:
    from minitri.files.gguf.container import StoredTensor

FORMS = {name: Form[theirs] for name, theirs in read_table("gguf_form").items()}
"""Types of GGUF that the CPU kernels can read, by name, with the kernels' `Form` of each."""
BYTES_AT_ONCE = 1 << 24  # of a file that are read before their memory is freed


def repack(
    stored: "StoredTensor", kernels: Kernels, place_NX: Tensor, rows_N: Tensor | None = None
) -> None:
    """Writes a stored matrix in the kernels' layout (`devices/cpu/quantized.py`) into a uint8
    tensor; row n is the file's row `rows_N[n]`, or row n without `rows_N`."""
    N, E = stored.shape
    rows_N = torch.arange(N) if rows_N is None else rows_N
    num_rows = -(-BYTES_AT_ONCE // (PANEL * stored.data.shape[1])) * PANEL
    for rows, place in zip(rows_N.split(num_rows), place_NX.split(num_rows), strict=True):
        kernels.repack(stored.data, FORMS[stored.type.name], rows, place, E)
        stored.release()


def dequantize(stored: "StoredTensor", kernels: Kernels | None) -> Tensor:
    """Dequantizes a stored tensor to float32 (integers stay integers), faster with kernels."""
    import gguf

    form = FORMS.get(stored.type.name)
    if kernels is None or form is None or len(stored.shape) != 2:
        values = gguf.dequantize(stored.data, stored.type)
        return torch.from_numpy(np.require(values, requirements="W"))  # no view of the file
    N, E = stored.shape
    packed_NX = torch.empty(packed_shape(N, E, form), dtype=torch.uint8)
    repack(stored, kernels, packed_NX)
    return kernels.dequantize(packed_NX, E, form, torch.float32)[:N]
