"""What the model, and whoever reads with it, ask of a KV cache.

A cache holds keys and values of the tokens that were *inputs* of the model, one row per sequence. During a forward pass
each layer hands over the K and V of its block and gets back that layer's tensors with the block standing right behind
every row's prefix. The lengths do not move during a forward pass: whoever decides that the block's tokens stay calls
`advance` afterwards. Slots behind a row's length are garbage, and nothing may depend on them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Cache(Protocol):
    """A KV cache. B rows, T block tokens, K KV heads, S slots, D head dim."""

    lengths_B: Tensor | None
    """On a GPU `lengths` as kernels see them, always the same memory; `publish_lengths` brings it up to date."""

    @property
    def lengths(self) -> list[int]:
        """Valid slots per row, on the host: the prefix that a block attends to."""
        ...

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each row's sequence that have been read; a small cache holds fewer of them than that."""
        ...

    @property
    def next_positions(self) -> list[int]:
        """Where the next token of each row stands for its rotary embedding."""
        ...

    def update(self, layer: int, raw_BTKD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the block behind every row's prefix; returns keys and values (B, K, S, D) to attend to.

        Keys arrive as they come from their projection and rotated by the positions that the cache named.
        """
        ...

    def advance(self, counts: list[int]) -> None:
        """Keeps the first `counts[b]` tokens of the block that was just written."""
        ...

    def crop(self, num_tokens: list[int]) -> None:
        """Forgets every token of row b from the `num_tokens[b]`-th on; 0 empties the row."""
        ...


def write_behind(slots_BKSD: Tensor, block_BTKD: Tensor, starts: list[int], starts_B: Tensor | None = None) -> None:
    """Writes a block into the slots of one layer, row b's from slot `starts[b]` on; where `starts_B` says the same on
    the device, without asking the host."""
    T = block_BTKD.shape[1]
    if starts_B is not None:
        places_BT = starts_B.unsqueeze(1) + torch.arange(T, device=starts_B.device)
        rows_B1 = torch.arange(len(starts_B), device=starts_B.device).unsqueeze(1)
        slots_BKSD[rows_B1, :, places_BT] = block_BTKD
        return
    for b, start in enumerate(starts):
        slots_BKSD[b, :, start : start + T] = block_BTKD[b].transpose(0, 1)


def device_lengths(batch_size: int, device: torch.device) -> Tensor | None:
    """Room for the lengths of a new cache where kernels see them; None on a CPU, which has no need of it."""
    return torch.zeros(batch_size, dtype=torch.int64, device=device) if device.type == "cuda" else None


def publish_lengths(cache: Cache) -> None:
    """Shows the kernels how long the rows of a cache are now; to be called before a forward pass."""
    if cache.lengths_B is not None:
        cache.lengths_B.copy_(torch.tensor(cache.lengths), non_blocking=True)
