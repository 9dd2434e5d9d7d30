"""KV caches: slots for K and V, and how many of them are valid per row.

A cache holds K and V of the tokens that were *inputs* of the model. In a forward pass each layer
writes K and V of a block right after every row's prefix, and attends to both. Only `advance`,
`crop`, `hold` and `reset` change lengths; slots after a row's length are undefined.
Legend: L layers, B rows, T tokens of a block, K KV heads, S slots, D head dim.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

Slots = Any  # keys or values (..., S, D): a tensor, or another layout that is indexed like one
KV = tuple[Tensor, Tensor]  # keys and values


def plain_slots(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> KV:
    """Allocates uninitialised keys and values: two tensors of this `shape`, (..., S, D)."""
    keys = torch.empty(shape, dtype=dtype, device=device)
    return keys, torch.empty_like(keys)


class BlockKV(NamedTuple):
    """K and V of a block, the T new tokens of each row, in one layer."""

    raw_keys_BTKD: Tensor  # before the rotary embedding
    keys_BTKD: Tensor  # rotated by the positions of the block's tokens
    values_BTKD: Tensor  # V of the block
    slots_BT: Tensor | None = None  # where K and V go; None: right after each row's prefix


@dataclass
class Filled:
    """How many slots of a cache's row are valid, and how many tokens of its text are in none."""

    num_slots: int = 0  # valid ones, which come first
    num_left_out: int = 0  # tokens of the row's text, read or skipped, that are in no slot


class Cache:
    """A KV cache: `keys` and `values` (L, B, K, S, D) of B rows, each with its own length."""

    is_hosted = False  # whether K and V are partly in host memory

    def __init__(self, keys: Slots, values: Slots) -> None:
        self.keys = keys
        self.values = values
        self._filled = [Filled() for _ in range(keys.shape[1])]

    @property
    def lengths(self) -> list[int]:
        """Number of valid slots of each row, its first ones: the prefix that new tokens see."""
        return [row.num_slots for row in self._filled]

    @property
    def num_tokens(self) -> list[int]:
        """Number of tokens of each row's text that were read or skipped, still cached or not."""
        return [row.num_slots + row.num_left_out for row in self._filled]

    @property
    def next_positions(self) -> list[int]:
        """Position of the next token of each row, for its rotary embedding."""
        return self.num_tokens

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def update(self, layer: int, block: BlockKV) -> KV:
        """Writes K and V after each row's prefix; returns the layer's keys, values (B, K, S, D)."""
        return write_block(self.keys[layer], self.values[layer], block, self.lengths)

    def advance(self, counts: list[int]) -> None:
        """Adds the first `counts[b]` tokens of the block just read to the prefix of row b."""
        for row, count in zip(self._filled, counts, strict=True):
            row.num_slots += count
            assert row.num_slots <= self.capacity

    def take_committed(self, active: Sequence[bool]) -> None:
        """In a retrieval cache, copies active rows' accepted K and V from the full one."""

    def crop(self, num_tokens: list[int]) -> None:
        """Cuts each row b to at most the first `num_tokens[b]` tokens of its text."""
        for b, most in enumerate(num_tokens):
            self.crop_row(b, most)

    def crop_row(self, b: int, num_tokens: int) -> None:
        row = self._filled[b]
        num_kept = min(row.num_slots, num_tokens - row.num_left_out)
        self.hold(b, num_kept, num_kept + row.num_left_out)

    def reset(self, b: int) -> None:
        self.hold(b, 0, 0)

    def of_rows(self, rows: slice) -> Self:
        """A cache of a slice of the rows, which shares slots and lengths with this one."""
        part = copy.copy(self)
        part.keys = self.keys[:, rows]
        part.values = self.values[:, rows]
        part._filled = self._filled[rows]
        return part

    def row(self, b: int) -> Self:
        return self.of_rows(slice(b, b + 1))

    def keep_path(self, b: int, path: list[int]) -> None:
        """Moves K and V of nodes `path` of row b's tree, the last block, to right after node 0."""
        for slots in (self.keys, self.values):
            gather_path(slots, b, self.lengths[b], path)

    def hold(self, b: int, num_slots: int, num_tokens: int) -> None:
        """Declares row b's first `num_slots` slots valid, and `num_tokens` tokens read in all."""
        assert 0 <= num_slots <= self.capacity
        row = self._filled[b]
        row.num_slots = num_slots
        row.num_left_out = num_tokens - num_slots


def gather_path(slots_LBKSD: Slots, b: int, start: int, path: list[int]) -> None:
    """Moves K or V of row b's tree nodes: slots start + `path[i]` to slots start + 1 + i."""
    places = torch.tensor(path).to(slots_LBKSD.device) + start
    row_LKSD = slots_LBKSD[:, b]
    row_LKSD[:, :, start + 1 : start + 1 + len(path)] = row_LKSD[:, :, places]


def write_block(keys_BKSD: Tensor, values_BKSD: Tensor, block: BlockKV, starts: list[int]) -> KV:
    """Writes K, V at `block.slots_BT`, else from slot `starts[b]` on; returns keys and values."""
    write_after(keys_BKSD, block.keys_BTKD, starts, block.slots_BT)
    write_after(values_BKSD, block.values_BTKD, starts, block.slots_BT)
    return keys_BKSD, values_BKSD


def write_after(
    layer_BKSD: Tensor, block_BTKD: Tensor, starts: list[int], slots_BT: Tensor | None
) -> None:
    """Writes a block's keys or values to a layer: at `slots_BT`, else from slot `starts[b]` on."""
    block_BKTD = block_BTKD.transpose(1, 2)
    if slots_BT is not None:
        layer_BKSD.scatter_(2, slots_BT[:, None, :, None].expand_as(block_BKTD), block_BKTD)
        return
    for b, start in enumerate(starts):
        layer_BKSD[b, :, start : start + block_BKTD.shape[2]] = block_BKTD[b]
