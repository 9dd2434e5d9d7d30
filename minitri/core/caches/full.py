"""The full cache: K and V of every token, keys rotated at their absolute positions.

The first `lengths[b]` slots of row b hold what a new prefill of its tokens would write, up to
rounding. Legend: L layers, B batch, S slots, K KV heads, D head dim, T tokens, P = 2 (K and V).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minitri.core.model.cache import KV, Cache, plain_slots
from minitri.core.model.execution import MakeSlots
from minitri.core.model.llama import Llama
from minitri.core.settings import pad_to_stride
from minitri.core.stats import Tokens, num_common


class FullCache(Cache):
    """K and V of all tokens of each row, in order."""

    @classmethod
    def allocate(
        cls, model: Llama, batch_size: int, capacity: int, make_slots: MakeSlots = plain_slots
    ) -> "FullCache":
        """An empty cache of `batch_size` rows of `capacity` slots or more, made by `make_slots`."""
        config = model.config
        slots = pad_to_stride(capacity)
        shape = (config.num_layers, batch_size, config.num_kv_heads, slots, config.head_dim)
        return cls(*make_slots(shape, model.dtype, model.device))

    @property
    def on_chip(self) -> int:
        """Number of layers whose keys and values stay on the device."""
        return self.keys.shape[0]

    def layers(self, b: int) -> Iterator[KV]:
        """Yields keys and values (K, S, D) of row b by layer, each pair valid until the next."""
        yield from zip(self.keys[:, b], self.values[:, b], strict=True)

    held_layers = layers  # all slots, also of a row whose text has ended (length 0)

    def tokens(self, b: int, start: int, end: int) -> KV:
        """Keys and values (L, K, T, D) of row b's tokens from `start` to `end`, on the device."""
        keys, values = self.keys[:, b], self.values[:, b]
        if self.device.type == "cpu":
            return keys[:, :, start:end], values[:, :, start:end]
        # Copied by one kernel, where a view of over 2 GB would take many.
        places_T = torch.arange(start, end, device=self.device)
        return keys.index_select(2, places_T), values.index_select(2, places_T)

    def write(self, layer: int, b: int, keys_KTD: Tensor, values_KTD: Tensor) -> None:
        """Writes a layer's K, V of T tokens to empty row b; call `restore` after the last layer."""
        for slots, new_KTD in ((self.keys, keys_KTD), (self.values, values_KTD)):
            slots[layer, b, :, : new_KTD.shape[1]] = new_KTD

    def restore(self, b: int, num_tokens: int) -> None:
        """Declares the first `num_tokens` slots of the empty row b valid: `write` filled them."""
        self.hold(b, num_tokens, num_tokens)


@dataclass(frozen=True)
class HeldRow:
    """A text, ended, in progress or from a file, whose K and V are in a row of a full cache."""

    full: FullCache  # the cache that has the row
    b: int  # the row in `full`
    tokens: Tokens  # of the text
    owner: str | None = None  # whose prompts may reuse the K and V; None: everybody's
    first_LPKTD: Tensor | tuple[()] = ()  # copy of the first slots, if these may be overwritten

    def layers(self, num_tokens: int) -> Iterator[KV]:
        """Restores overwritten slots; yields by layer K, V (K, T, D) of first T = `num_tokens`."""
        for layer, first_PKTD in enumerate(self.first_LPKTD):
            self.full.write(layer, self.b, *first_PKTD)
        for keys_KSD, values_KSD in self.full.held_layers(self.b):
            yield keys_KSD[:, :num_tokens], values_KSD[:, :num_tokens]

    def num_shared(self, tokens: Tokens, owner: str) -> int:
        """Number of first tokens shared with `tokens`; 0 if `owner` may not reuse these K and V."""
        return num_common(self.tokens, tokens) if self.owner in (None, owner) else 0
