"""The drafter's cache: attention sinks and a window of recent tokens (StreamingLLM), for texts of any length.

Keys are stored as they come, before rotation, and rotated by the *slot* they stand in, so a drafter with a context of
2K serves a text of a million tokens: it never sees a position beyond its window. A rotated copy is kept beside them,
made anew only when the window slides, which happens in strides of `SLIDE` tokens rather than with every one.

Layout (L, B, K, S, D) as in the full cache. Sliding happens between rounds only, so a crop always finds what it takes
back at the end of the window.

Legend: L layers, B batch, S slots, K KV heads, D head dim, T new tokens.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from minitri.model.cache import write_behind
from minitri.model.config import ModelConfig
from minitri.model.rope import Rope

SLIDE = 32
"""Tokens by which the window may outgrow `num_recent_tokens` before it slides."""


class StreamingCache:
    """Sinks + recent tokens of B rows: raw keys, rotated keys and values."""

    def __init__(
        self,
        config: ModelConfig,
        rope: Rope,
        batch_size: int,
        *,
        num_sink_tokens: int,
        num_recent_tokens: int,
        room: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`room`: slots that must be free after a slide."""
        self.num_sink_tokens = num_sink_tokens
        self.num_recent_tokens = num_recent_tokens
        self._rope = rope
        self._room = room
        capacity = num_sink_tokens + num_recent_tokens + SLIDE + room
        shape = (config.num_layers, batch_size, config.num_kv_heads, capacity, config.head_dim)
        self.raw_keys, self.keys, self.values = (
            torch.empty(shape, dtype=dtype, device=device) for _ in range(3)
        )
        self._lengths = [0] * batch_size
        self._num_tokens = [0] * batch_size

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for keys, twice, and values."""
        return 3 * self.keys.numel() * self.keys.element_size()

    @property
    def lengths(self) -> list[int]:
        return self._lengths

    @property
    def num_tokens(self) -> list[int]:
        return self._num_tokens

    @property
    def next_positions(self) -> list[int]:
        return self._lengths

    def update(
        self,
        layer: int,
        raw_BTKD: Tensor,
        k_BTKD: Tensor,
        v_BTKD: Tensor,
        slots_BT: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        for slots, block in ((self.raw_keys, raw_BTKD), (self.keys, k_BTKD), (self.values, v_BTKD)):
            write_behind(slots[layer], block, self._lengths, slots_BT)
        return self.keys[layer], self.values[layer]

    def advance(self, counts: list[int]) -> None:
        self._lengths = [
            length + count for length, count in zip(self._lengths, counts, strict=True)
        ]
        self._num_tokens = [
            seen + count for seen, count in zip(self._num_tokens, counts, strict=True)
        ]

    def crop(self, num_tokens: list[int]) -> None:
        for b, (seen, wanted) in enumerate(zip(self._num_tokens, num_tokens, strict=True)):
            assert wanted <= seen
            self._lengths[b] = max(0, self._lengths[b] - (seen - wanted)) if wanted else 0
            self._num_tokens[b] = wanted

    def empty_row(self, b: int) -> StreamingCache:
        """An empty cache of one row that shares memory with row b; hand back what was read with `hold`."""
        row = copy.copy(self)
        row.raw_keys, row.keys, row.values = (
            slots[:, b : b + 1] for slots in (self.raw_keys, self.keys, self.values)
        )
        row._lengths, row._num_tokens = [0], [0]
        return row

    def hold(self, b: int, *, num_slots: int, num_tokens: int) -> None:
        """Says that row b's first slots are valid and stand for so many tokens, most of which were left out."""
        self._lengths[b], self._num_tokens[b] = num_slots, num_tokens

    def slide(self) -> None:
        """Makes room for another block in rows that have run out of it, by dropping what is neither sink nor recent."""
        capacity = self.keys.shape[3]
        for b, length in enumerate(self._lengths):
            if length + self._room <= capacity:
                continue
            sinks, kept = self.num_sink_tokens, self.num_sink_tokens + self.num_recent_tokens
            for slots in (self.raw_keys, self.values):
                slots[:, b, :, sinks:kept] = slots[
                    :, b, :, length - self.num_recent_tokens : length
                ].clone()
            positions = torch.arange(sinks, kept, device=self.keys.device).unsqueeze(0)
            moved_LTKD = self.raw_keys[:, b, :, sinks:kept].transpose(1, 2)
            self.keys[:, b, :, sinks:kept] = (
                self._rope.at(positions).rotate(moved_LTKD).transpose(1, 2)
            )
            self._lengths[b] = kept
