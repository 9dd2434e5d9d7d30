"""The `Cache` protocol: what the model, and whoever runs it, ask of a KV cache.

A cache holds K and V of the tokens that were *inputs* of the model, one row per sequence. In a
forward pass each layer writes the K and V of its block right after every row's prefix, and attends
to both. Lengths do not move in a forward pass: whoever decides that the block's tokens stay calls
`advance` afterwards. Slots past a row's length are garbage, and nothing may depend on them.

Legend: B rows, T tokens of a block, K KV heads, S slots, D head dim.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

STRIDE = 64
"""Caches have a multiple of this many slots per row, so that rows lie alike in memory."""


def round_up_to_stride(num_slots: int) -> int:
    """The next multiple of STRIDE."""
    return -(-num_slots // STRIDE) * STRIDE


class BlockKV(NamedTuple):
    """K and V of a block in one layer, as the layer hands them to the cache."""

    raw_keys_BTKD: Tensor
    """As projected."""
    keys_BTKD: Tensor
    """Rotated to the cache's `next_positions` and further."""
    values_BTKD: Tensor
    slots_BT: Tensor | None = None
    """On the device, where the block belongs; None: the cache goes by `lengths`."""


class Cache(Protocol):
    """A KV cache of B rows."""

    @property
    def lengths(self) -> list[int]:
        """Valid slots per row, on the host: the prefix that a block attends to."""

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each row's sequence that were read; a small cache holds fewer than that."""

    @property
    def next_positions(self) -> list[int]:
        """Position of the next token of each row, for its rotary embedding."""

    def update(self, layer: int, block: BlockKV) -> tuple[Tensor, Tensor]:
        """Writes the block after every row's prefix; returns K and V (B, K, S, D) to attend to."""

    def advance(self, counts: list[int]) -> None:
        """Keeps the first `counts[b]` tokens of the block that was just written."""

    def crop(self, num_tokens: list[int]) -> None:
        """Takes tokens back: row b keeps the first `num_tokens[b]` of those it has read."""

    def reset(self, b: int) -> None:
        """Empties row b, for another sequence."""


class TreeCache(Cache, Protocol):
    """A cache whose blocks may be trees."""

    def keep_path(self, b: int, path: list[int]) -> None:
        """Moves K and V of the block's tokens at these places, rising, right after its first."""


def gather_path(slots_LBKSD: Tensor, b: int, start: int, path: list[int]) -> None:
    """`TreeCache.keep_path` for keys or values of a block that begins at slot `start`."""
    places = torch.tensor(path).to(slots_LBKSD.device) + start
    slots_LBKSD[:, b, :, start + 1 :][:, :, : len(path)] = slots_LBKSD[:, b].index_select(2, places)


def write_block(
    keys_BKSD: Tensor, values_BKSD: Tensor, block: BlockKV, starts: list[int]
) -> tuple[Tensor, Tensor]:
    """Writes a block's K and V into those of one layer, and returns the latter."""
    write_after(keys_BKSD, block.keys_BTKD, starts, block.slots_BT)
    write_after(values_BKSD, block.values_BTKD, starts, block.slots_BT)
    return keys_BKSD, values_BKSD


def write_after(
    layer_BKSD: Tensor, block_BTKD: Tensor, starts: list[int], slots_BT: Tensor | None
) -> None:
    """Writes a block into one layer: to `slots_BT`, without asking the host, else from `starts`."""
    block_BKTD = block_BTKD.transpose(1, 2)
    if slots_BT is not None:
        layer_BKSD.scatter_(2, slots_BT[:, None, :, None].expand_as(block_BKTD), block_BKTD)
        return
    for b, start in enumerate(starts):
        layer_BKSD[b, :, start : start + block_BKTD.shape[2]] = block_BKTD[b]
