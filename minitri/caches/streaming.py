"""The drafter's cache: attention sinks and recent tokens (StreamingLLM), for texts of any length.

Keys are stored as they come, before rotation, and rotated by the *slot* they stand in, so a drafter
with a context of 2K serves a text of a million tokens: it never sees a position beyond its window.
A rotated copy is kept next to them and made anew only when the window slides, which happens in
strides of `SLIDE` tokens, and between steps only, so a crop always finds what it takes back at the
end of the window.

Layout (L, B, K, S, D) as in the full cache.

Legend: L layers, B batch, S slots, K KV heads, D head dim, T new tokens.
"""

import copy
from typing import Self

import torch
from torch import Tensor

from minitri.config import ModelConfig
from minitri.model.cache import BlockKV, write_after
from minitri.model.rope import Rope
from minitri.settings import SpeculationConfig

SLIDE = 32
"""Tokens by which the window may outgrow `num_recent_tokens` before it slides."""


def window_slots(speculation: SpeculationConfig) -> int:
    """Slots per row: sinks, recent tokens, what may come before a slide, and a block."""
    kept = speculation.num_sink_tokens + speculation.num_recent_tokens
    return kept + SLIDE + speculation.room


def window_problem(config: ModelConfig, speculation: SpeculationConfig) -> str:
    """Why a drafter cannot serve a window of this size; empty if it can."""
    num_slots = window_slots(speculation)
    context = config.context_length
    if num_slots <= context:
        return ""
    return (
        f"the drafter {config.name} holds {context} tokens but its window needs {num_slots} "
        f"(num_recent_tokens={speculation.num_recent_tokens} and room for guesses); lower "
        "--num-recent-tokens, --num-sink-tokens or the gammas"
    )


class StreamingCache:
    """Sinks and recent tokens of B rows: raw keys, rotated keys and values."""

    def __init__(
        self,
        config: ModelConfig,
        rope: Rope,
        batch_size: int,
        speculation: SpeculationConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_sink_tokens = speculation.num_sink_tokens
        self.num_recent_tokens = speculation.num_recent_tokens
        self._rope = rope
        self._room = speculation.room
        slots = window_slots(speculation)
        shape = (config.num_layers, batch_size, config.num_kv_heads, slots, config.head_dim)
        tensors = (torch.empty(shape, dtype=dtype, device=device) for _ in range(3))
        self.raw_keys, self.keys, self.values = tensors
        self._lengths = [0] * batch_size
        self._num_tokens = [0] * batch_size

    @property
    def num_bytes(self) -> int:
        """Bytes reserved for keys, twice, and values."""
        return 3 * self.keys.numel() * self.keys.element_size()

    @property
    def lengths(self) -> list[int]:
        """Valid slots per row."""
        return self._lengths

    next_positions = lengths

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each row's text that have been read, or left out of the window."""
        return self._num_tokens

    def update(self, layer: int, block: BlockKV) -> tuple[Tensor, Tensor]:
        slots = (self.raw_keys, self.keys, self.values)
        for slots_LBKSD, new_BTKD in zip(slots, block[:3], strict=True):
            write_after(slots_LBKSD[layer], new_BTKD, self._lengths, block.slots_BT)
        return self.keys[layer], self.values[layer]

    def advance(self, counts: list[int]) -> None:
        for b, count in enumerate(counts):
            self._lengths[b] += count
            self._num_tokens[b] += count

    def crop(self, num_tokens: list[int]) -> None:
        for b, wanted in enumerate(num_tokens):
            num_dropped = self._num_tokens[b] - wanted
            assert 0 <= num_dropped <= self._lengths[b]
            self._lengths[b] -= num_dropped
            self._num_tokens[b] = wanted

    def reset(self, b: int) -> None:
        self._lengths[b] = self._num_tokens[b] = 0

    def empty_row(self, b: int) -> Self:
        """An empty cache of one row that shares memory with row b; see `set_window`."""
        row = copy.copy(self)
        tensors = (slots[:, b : b + 1] for slots in (self.raw_keys, self.keys, self.values))
        row.raw_keys, row.keys, row.values = tensors
        row._lengths, row._num_tokens = [0], [0]
        return row

    def set_window(self, b: int, *, num_slots: int, num_tokens: int) -> None:
        """Declares row b's first slots valid; they stand for `num_tokens`, most left out."""
        self._lengths[b] = num_slots
        self._num_tokens[b] = num_tokens

    def slide(self) -> None:
        """In rows without room for another block, drops what is neither sink nor recent."""
        capacity = self.keys.shape[3]
        sinks, kept = self.num_sink_tokens, self.num_sink_tokens + self.num_recent_tokens
        for b, length in enumerate(self._lengths):
            if length + self._room <= capacity:
                continue
            for slots in (self.raw_keys, self.values):
                recent = slots[:, b, :, length - self.num_recent_tokens : length]
                slots[:, b, :, sinks:kept] = recent.clone()
            positions = torch.arange(sinks, kept, device=self.keys.device).unsqueeze(0)
            moved_LTKD = self.raw_keys[:, b, :, sinks:kept].transpose(1, 2)
            rotated_LTKD = self._rope.at(positions).rotate(moved_LTKD)
            self.keys[:, b, :, sinks:kept] = rotated_LTKD.transpose(1, 2)
            self._lengths[b] = kept
