"""What the model, and whoever reads with it, ask of a KV cache.

A cache holds keys and values of the tokens that were *inputs* of the model, one row per sequence. During a forward pass
each layer hands over the K and V of its block and gets back that layer's tensors with the block standing right behind
every row's prefix. The lengths do not move during a forward pass: whoever decides that the block's tokens stay calls
`advance` afterwards. Slots behind a row's length are garbage, and nothing may depend on them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Cache(Protocol):
    """A KV cache. B rows, T block tokens, K KV heads, S slots, D head dim."""

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

    def update(
        self,
        layer: int,
        raw_BTKD: Tensor,
        k_BTKD: Tensor,
        v_BTKD: Tensor,
        slots_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Writes the block behind every row's prefix; returns keys and values (B, K, S, D) to attend to.

        Keys arrive as they come from their projection and rotated by the positions that the cache named. `slots_BT`
        says on the device where the block belongs; without it the cache goes by its lengths on the host.
        """
        ...

    def advance(self, counts: list[int]) -> None:
        """Keeps the first `counts[b]` tokens of the block that was just written."""
        ...

    def crop(self, num_tokens: list[int]) -> None:
        """Forgets every token of row b from the `num_tokens[b]`-th on; 0 empties the row."""
        ...


def write_block(
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    starts: list[int],
    slots_BT: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Writes a block's K and V into those of one layer, see `write_behind`, and returns the latter."""
    write_behind(keys_BKSD, k_BTKD, starts, slots_BT)
    write_behind(values_BKSD, v_BTKD, starts, slots_BT)
    return keys_BKSD, values_BKSD


def write_behind(
    layer_BKSD: Tensor, block_BTKD: Tensor, starts: list[int], slots_BT: Tensor | None
) -> None:
    """Writes a block into one layer: into the slots named, without asking the host, else row b's from slot `starts[b]`
    on."""
    block_BKTD = block_BTKD.transpose(1, 2)
    if slots_BT is not None:
        layer_BKSD.scatter_(2, slots_BT[:, None, :, None].expand_as(block_BKTD), block_BKTD)
        return
    for b, start in enumerate(starts):
        layer_BKSD[b, :, start : start + block_BKTD.shape[2]] = block_BKTD[b]
