"""Slots of a KV cache in tiles: the layout in which compiled CPU kernels multiply them.

Numbers of neighbouring slots are neighbours in memory, so that kernels need not transpose.
`Tiles` is indexed like a tensor (..., S, D), but not along D; an ellipsis can only come first.
Reading slots copies.
Legend: S slots, T of them, D head dim, N tiles of P slots, U units (numbers or pairs) of a slot.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PANEL = 16  # slots of a tile of keys
COLUMNS = 32  # a head dim in tiles must be a multiple of this


@dataclass(eq=False)
class Tiles:
    """Keys or values (..., S, D) of a KV cache in N tiles of P slots, each tile transposed."""

    units: Tensor  # (..., N, U, P): U numbers, or pairs of numbers, of each slot
    dtype: torch.dtype  # of the numbers

    @property
    def pair(self) -> int:
        """Numbers in a unit: 2 in keys whose numbers vector lanes multiply in pairs, else 1."""
        return self.units.itemsize // self.dtype.itemsize

    @property
    def shape(self) -> torch.Size:
        *rows, N, U, P = self.units.shape
        return torch.Size([*rows, N * P, U * self.pair])

    @property
    def device(self) -> torch.device:
        return self.units.device

    @property
    def nbytes(self) -> int:
        return self.units.nbytes

    def stride(self) -> tuple[int, ...]:
        """Strides of the axes of `shape`, in numbers, as if slots were stored one after another."""
        *rows, _, _, _ = self.units.stride()
        return (*(it * self.pair for it in rows), self.shape[-1], 1)

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, index: Any) -> Any:
        """A view in tiles if no slots (axis -2) are indexed; else a copy of them as a tensor."""
        rows, slots = self._split(index)
        if slots is None:
            return Tiles(self.units[rows], self.dtype)
        P = self.units.shape[-1]
        if isinstance(slots, Tensor):
            found = self.units.transpose(-2, -1)[(*rows, slots // P, slots % P)]
            return found.contiguous().view(self.dtype)
        start, end, _ = slots.indices(self.shape[-2])
        first = start // P * P
        some_NUP = self.units[rows][..., first // P : -(-end // P), :, :]
        slots_SU = some_NUP.transpose(-2, -1).flatten(-3, -2).contiguous()
        return slots_SU[..., start - first : end - first, :].view(self.dtype)

    def __setitem__(self, index: Any, values: Any) -> None:
        rows, slots = self._split(index)
        slots_T = torch.arange(*slots.indices(self.shape[-2]))
        units_NPU = self.units[rows].transpose(-2, -1)
        P = self.units.shape[-1]
        new_TD = torch.empty(*units_NPU.shape[:-3], len(slots_T), self.shape[-1], dtype=self.dtype)
        new_TD[...] = values
        units_NPU[..., slots_T // P, slots_T % P, :] = new_TD.view(self.units.dtype)

    def _split(self, index: Any) -> tuple[tuple[Any, ...], Any]:
        """Splits an index into that of the axes before S, and that of S (None if it has none)."""
        index = index if isinstance(index, tuple) else (index,)
        place = len(self.shape) - 2  # of slots among the axes
        if index[0] is ...:
            index = (slice(None),) * (place + 3 - len(index)) + index[1:]
        slots, *numbers = index[place:] or (None,)
        assert numbers in ([], [slice(None)])
        return index[:place], slots


def tiled_slots(shape: tuple[int, ...], dtype: torch.dtype, pair: int) -> tuple[Tiles, Tiles]:
    """Empty keys and values (..., S, D) in tiles, for vector lanes that multiply `pair` numbers."""
    *rows, S, D = shape
    keys = torch.empty(*rows, S // PANEL, D // pair, PANEL, pair, dtype=dtype)
    values = torch.empty(*rows, S // pair, D, pair, dtype=dtype)
    units = torch.int32 if pair == 2 else dtype
    return Tiles(keys.view(units).squeeze(-1), dtype), Tiles(values, dtype)
