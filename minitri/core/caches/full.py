"""The full cache: K and V of every token, keys rotated at their absolute positions.

The first `lengths[b]` slots hold what a fresh prefill of the inputs would write, up to rounding.
Legend: L layers, B batch, S slots, K KV heads, D head dim, T new tokens, P = 2 keys and values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minitri.core.config import ModelConfig
from minitri.core.model.cache import Cache, plain_slots
from minitri.core.model.execution import MakeSlots
from minitri.core.settings import round_up_to_stride
from minitri.core.stats import num_common


class FullCache(Cache):
    """K and V of all tokens of each row, in order."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        batch_size: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        make_slots: MakeSlots | None = None,
    ) -> "FullCache":
        """An empty cache of `batch_size` rows with room for at least `capacity` tokens each."""
        slots = round_up_to_stride(capacity)
        shape = (config.num_layers, batch_size, config.num_kv_heads, slots, config.head_dim)
        return cls(*(make_slots or plain_slots)(shape, dtype, device))

    @property
    def on_chip(self) -> int:
        """Layers whose keys and values stay on the device."""
        return self.keys.shape[0]

    def layers(self, b: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values (K, S, D) of row b, layer by layer; valid until the next pair."""
        yield from zip(self.keys[:, b], self.values[:, b], strict=True)

    held_layers = layers  # of all slots of row b, whatever its length

    def tokens(self, b: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values (L, K, T, D) of row b's tokens from `start` to `end`, on the device."""
        keys, values = self.keys[:, b], self.values[:, b]
        if self.device.type == "cpu":
            return keys[:, :, start:end], values[:, :, start:end]
        # Copied by one kernel, where a view of over 2 GB would take many.
        places_T = torch.arange(start, end, device=self.device)
        return keys.index_select(2, places_T), values.index_select(2, places_T)

    def write(self, layer: int, b: int, keys_KTD: Tensor, values_KTD: Tensor) -> None:
        """Writes K and V of the first T tokens of row b, which is empty; call `restore` then."""
        for slots, new_KTD in ((self.keys, keys_KTD), (self.values, values_KTD)):
            slots[layer, b, :, : new_KTD.shape[1]] = new_KTD

    def restore(self, b: int, num_tokens: int) -> None:
        """Makes the first `num_tokens` slots of row b, which was empty, its prefix."""
        self.hold(b, num_tokens, num_tokens)


@dataclass(frozen=True)
class HeldRow:
    """Tokens whose K and V are cached: of a text that has ended or not, or of a snapshot."""

    full: FullCache
    b: int
    tokens: list[int]
    owner: str | None = None  # who may share it; None: everybody
    first_LPKTD: Tensor | tuple[()] = ()  # saved K and V, where slots may be overwritten

    def layers(self, num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """As `FullCache.layers`, of the first T tokens; restores slots that were overwritten."""
        for layer, first_PKTD in enumerate(self.first_LPKTD):
            self.full.write(layer, self.b, *first_PKTD)
        for keys_KSD, values_KSD in self.full.held_layers(self.b):
            yield keys_KSD[:, :num_tokens], values_KSD[:, :num_tokens]

    def num_shared(self, tokens: list[int], owner: str) -> int:
        """Tokens at the beginning of an owner's text that are cached here."""
        return num_common(self.tokens, tokens) if self.owner in (None, owner) else 0
