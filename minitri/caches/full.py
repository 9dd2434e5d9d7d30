"""The full cache: K and V of every token, keys rotated at their absolute positions; and what all
caches share: slots, and how many of them are valid per row.

A row's valid slots are a prefix: tokens of its text in the cache's order, and the latest block.
Small caches leave tokens of the text out. Lengths are on the host, and change only by `advance`,
`crop`, `reset` and what a kind of cache adds to these. Invariant of a full cache: the first
`lengths[b]` slots hold exactly what a fresh prefill of the row's inputs would have written.

Layout (L, B, K, S, D): a KV head's keys are contiguous, which is what attention over a long prefix
wants, and a layer or a row is a view. Memory is reserved at once but touched only as it fills.

Legend: L layers, B batch, S slots, K KV heads, D head dim, T new tokens.
"""

import copy
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

from minitri.config import ModelConfig
from minitri.model.cache import BlockKV, gather_path, round_up_to_stride, write_block


class SlotCache:
    """`keys` and `values` (L, B, K, S, D) of B rows."""

    def __init__(self, keys: Tensor, values: Tensor, lengths: list[int] | None = None) -> None:
        self.keys, self.values = keys, values
        B = keys.shape[1]
        self._lengths = list(lengths or [0] * B)
        self._num_left_out = [0] * B
        """Tokens of each row's text that were read, or passed over, and stand in no slot."""

    @property
    def lengths(self) -> list[int]:
        """Valid slots per row."""
        return self._lengths

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each row's text that this cache stands for."""
        return [sum(pair) for pair in zip(self._lengths, self._num_left_out, strict=True)]

    @property
    def next_positions(self) -> list[int]:
        """Position of the next token of each row, for its rotary embedding."""
        return self.num_tokens

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(L, B, K, S, D) of keys and of values, wherever they are."""
        L, B, K, S, D = self.keys.shape
        return L, B, K, S, D

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.keys.device

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self.keys.shape[3]

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def update(self, layer: int, block: BlockKV) -> tuple[Tensor, Tensor]:
        return write_block(self.keys[layer], self.values[layer], block, self._lengths)

    def advance(self, counts: list[int]) -> None:
        self._set_lengths([old + count for old, count in zip(self._lengths, counts, strict=True)])

    def crop(self, num_tokens: list[int]) -> None:
        """Row b keeps at most the first `num_tokens[b]` of those it has read."""
        rows = zip(self._lengths, num_tokens, self._num_left_out, strict=True)
        self._set_lengths([min(old, new - left_out) for old, new, left_out in rows])

    def reset(self, b: int) -> None:
        self._hold(b, 0, 0)

    def row(self, b: int) -> Self:
        """A cache of row b alone, in the same memory; what it reads is counted there alone."""
        row = copy.copy(self)
        row.keys, row.values = (slots[:, b : b + 1] for slots in (self.keys, self.values))
        row._lengths, row._num_left_out = [self._lengths[b]], [self._num_left_out[b]]
        return row

    def keep_path(self, b: int, path: list[int]) -> None:
        for slots in (self.keys, self.values):
            gather_path(slots, b, self._lengths[b], path)

    def _hold(self, b: int, num_slots: int, num_tokens: int) -> None:
        """Row b's first slots are valid; they stand for `num_tokens` of its text."""
        self._num_left_out[b] = num_tokens - num_slots
        self._set_lengths([num_slots if b == row else n for row, n in enumerate(self._lengths)])

    def _set_lengths(self, lengths: list[int]) -> None:
        assert min(lengths) >= 0
        assert max(lengths) <= self.capacity
        self._lengths = lengths


class FullCache(SlotCache):
    """All tokens of each row, in their order."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        batch_size: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "FullCache":
        """An empty cache of `batch_size` rows with room for at least `capacity` tokens each."""
        slots = round_up_to_stride(capacity)
        shape = (config.num_layers, batch_size, config.num_kv_heads, slots, config.head_dim)
        keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values)

    @property
    def on_chip(self) -> int:
        """Layers whose keys and values stay on the device."""
        return self.keys.shape[0]

    def update(self, layer: int, block: BlockKV) -> tuple[Tensor, Tensor]:
        self._check_room(block.keys_BTKD.shape[1])
        return super().update(layer, block)

    def _check_room(self, T: int) -> None:
        longest = max(self._lengths)
        if longest + T > self.capacity:
            raise IndexError(
                f"a row holds {longest} of {self.capacity} tokens; a block of {T} does not fit"
            )

    def layers(self, b: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values (K, S, D) of row b on the device, layer by layer.

        Each pair is valid until the next is asked for.
        """
        yield from zip(self.keys[:, b], self.values[:, b], strict=True)

    held_layers = layers
    """The same of all slots of row b, whatever its length."""

    def tokens(self, b: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values (L, K, T, D) of row b's tokens from `start` to `end`, on the device; on a
        GPU copied by a kernel each, where a view of more than 2 GB would take many."""
        if self.device.type == "cpu":
            return self.keys[:, b, :, start:end], self.values[:, b, :, start:end]
        places = torch.arange(start, end, device=self.device)
        return self.keys[:, b].index_select(2, places), self.values[:, b].index_select(2, places)

    def write(self, layer: int, b: int, keys_KTD: Tensor, values_KTD: Tensor) -> None:
        """Writes K and V of the first tokens of row b, which is empty; see `restore`."""
        for slots, new_KTD in ((self.keys, keys_KTD), (self.values, values_KTD)):
            slots[layer, b, :, : new_KTD.shape[1]] = new_KTD

    def restore(self, b: int, num_tokens: int) -> None:
        """Row b, which was empty, holds `num_tokens`: they stand in its first slots."""
        self._hold(b, num_tokens, num_tokens)
