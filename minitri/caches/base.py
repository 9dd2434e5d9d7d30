"""What the model asks of a KV cache.

A cache holds keys and values of the tokens that were *inputs* of the model, one row per sequence. During a forward pass
each layer hands over the K and V of its block and gets back that layer's tensors with the block standing right behind
every row's prefix. The lengths do not move during a forward pass: whoever decides that the block's tokens stay calls
`advance` afterwards. Slots behind a row's length are garbage, and nothing may depend on them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from minitri.rope import Rotary


class Cache(Protocol):
    """A KV cache as `Llama.forward` sees it. B rows, T block tokens, K KV heads, S slots, D head dim."""

    @property
    def lengths(self) -> list[int]:
        """Valid tokens per row, on the host."""
        ...

    def update(self, layer: int, k_BTKD: Tensor, v_BTKD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Writes the block behind every row's prefix; returns keys and values (B, K, S, D) to attend to.

        Keys arrive unrotated, because not every cache stores them rotated at their absolute positions.
        """
        ...
