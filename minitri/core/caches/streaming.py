"""The draft model's cache: attention sinks and recent tokens (StreamingLLM), for any text length.

Keys are stored raw, and also rotated by their *slot*, not their position, so a drafter with a
context of 2K serves a text of a million tokens. The window slides between steps only.
Legend: L layers, B batch, S slots, K KV heads, D head dim, T new tokens.
"""

from typing import Self

import torch

from minitri.core.errors import InputError
from minitri.core.model.cache import KV, BlockKV, Cache, plain_slots, write_after
from minitri.core.model.llama import Llama
from minitri.core.settings import SpeculationConfig


class StreamingCache(Cache):
    """KV cache of sinks and recent tokens of B rows: keys, unrotated and rotated, and values."""

    def __init__(self, model: Llama, batch_size: int, speculation: SpeculationConfig) -> None:
        """An empty cache sized by `speculation`. Raises `InputError` beyond the model's context."""
        config = model.config
        slots = speculation.window_slots
        if slots > config.context_length:
            raise InputError(
                f"the drafter {config.name} holds {config.context_length} tokens but its window "
                f"needs {slots} (num_recent_tokens={speculation.num_recent_tokens} and room for "
                "guesses); lower num_recent_tokens=, num_sink_tokens= or the gammas"
            )
        slots += speculation.max_block  # a captured pass pads its block up to this length
        shape = (config.num_layers, batch_size, config.num_kv_heads, slots, config.head_dim)
        super().__init__(*plain_slots(shape, model.dtype, model.device))
        self.raw_keys = torch.empty_like(self.keys)
        self.settings = speculation
        self._model = model

    @property
    def next_positions(self) -> list[int]:
        return self.lengths

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.raw_keys.nbytes

    def update(self, layer: int, block: BlockKV) -> KV:
        write_after(self.raw_keys[layer], block.raw_keys_BTKD, self.lengths, block.slots_BT)
        return super().update(layer, block)

    def of_rows(self, rows: slice) -> Self:
        part = super().of_rows(rows)
        part.raw_keys = self.raw_keys[:, rows]
        return part

    def slide(self) -> None:
        """Slides the window: rows without room for another block keep sinks and recent tokens."""
        sinks = self.settings.num_sink_tokens
        kept = sinks + self.settings.num_recent_tokens
        room = self.settings.room + self.settings.max_block
        model = self._model
        unrotated = [*model.config.unrotated_layers]
        sliding = [*model.config.sliding_layers]
        for b, length in enumerate(self.lengths):
            if length + room <= self.capacity:
                continue
            for slots in (self.raw_keys, self.values):
                slots[:, b, :, sinks:kept] = slots[:, b, :, length - kept + sinks : length].clone()
            positions = torch.arange(sinks, kept, device=self.device).unsqueeze(0)
            moved_LTKD = self.raw_keys[:, b, :, sinks:kept].transpose(1, 2)
            rotated_LTKD = model.rope.at(positions).rotate(moved_LTKD)
            rotated_LTKD[unrotated] = moved_LTKD[unrotated]
            if sliding:
                rotated_LTKD[sliding] = model.window_rope.at(positions).rotate(moved_LTKD[sliding])
            self.keys[:, b, :, sinks:kept] = rotated_LTKD.transpose(1, 2)
            self.hold(b, kept, self.num_tokens[b])
