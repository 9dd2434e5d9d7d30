"""The full cache: every token's K and V, keys rotated at their absolute positions.

Layout (L, B, K, S, D): a KV head's keys are contiguous, which is what the matmuls over a long prefix want, and a layer
or a row is a view. Memory is reserved at once but touched only as it fills. One invariant: for each row the first
`lengths[b]` slots hold exactly what a fresh prefill of the row's inputs would have written.

Legend: L layers, B batch, S slots, K KV heads, D head dim, T new tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from minitri.model.attention import whole_strides
from minitri.model.cache import write_block
from minitri.model.config import ModelConfig


class FullCache:
    """Preallocated KV cache: `keys` and `values` (L, B, K, S, D), and how many tokens each row holds."""

    def __init__(self, keys: Tensor, values: Tensor, lengths: list[int]) -> None:
        self.keys = keys
        self.values = values
        self._lengths = list(lengths)

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        batch_size: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> FullCache:
        """An empty cache of `batch_size` rows with room for at least `capacity` tokens each."""
        shape = (
            config.num_layers,
            batch_size,
            config.num_kv_heads,
            whole_strides(capacity),
            config.head_dim,
        )
        keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values, [0] * batch_size)

    @property
    def lengths(self) -> list[int]:
        return self._lengths

    @property
    def num_tokens(self) -> list[int]:
        return self._lengths

    @property
    def next_positions(self) -> list[int]:
        return self._lengths

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
    def on_chip(self) -> int:
        """Layers whose keys and values stay on the device."""
        return self.keys.shape[0]

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self.shape[3]

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def update(
        self,
        layer: int,
        raw_BTKD: Tensor,  # noqa: ARG002
        k_BTKD: Tensor,
        v_BTKD: Tensor,
        slots_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        self._check_room(k_BTKD.shape[1])
        return write_block(
            self.keys[layer], self.values[layer], k_BTKD, v_BTKD, self._lengths, slots_BT
        )

    def _check_room(self, T: int) -> None:
        for b, start in enumerate(self._lengths):
            if start + T > self.capacity:
                raise IndexError(
                    f"row {b} holds {start} of {self.capacity} tokens; a block of {T} does not fit"
                )

    def layers(self, b: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values (K, S, D) of row b, layer by layer; on the device, and good until the next is asked for."""
        yield from zip(self.keys[:, b], self.values[:, b], strict=True)

    def tokens(self, b: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values (L, K, T, D) of row b's tokens from `start` to `end`, on the device."""
        return self.keys[:, b, :, start:end], self.values[:, b, :, start:end]

    def adopt(self, whole: FullCache) -> None:
        """Takes over, empty as it is, all that another cache holds, which is on the device as a whole."""
        end = max(whole.lengths)
        self.keys[..., :end, :] = whole.keys[..., :end, :]
        self.values[..., :end, :] = whole.values[..., :end, :]
        self.advance(whole.lengths)

    def row(self, b: int) -> FullCache:
        """A cache of one row that shares memory with row b, for prefilling rows of different lengths one by one.

        Its length starts as row b's; hand it back with `advance` on this cache.
        """
        return FullCache(self.keys[:, b : b + 1], self.values[:, b : b + 1], [self._lengths[b]])

    def advance(self, counts: list[int]) -> None:
        self._set_lengths(
            [length + count for length, count in zip(self._lengths, counts, strict=True)]
        )

    def crop(self, num_tokens: list[int]) -> None:
        assert all(new <= old for new, old in zip(num_tokens, self._lengths, strict=True))
        self._set_lengths(num_tokens)

    def reset(self) -> None:
        """Empties every row."""
        self._set_lengths([0] * len(self._lengths))

    def _set_lengths(self, lengths: list[int]) -> None:
        assert all(0 <= length <= self.capacity for length in lengths)
        self._lengths = list(lengths)
