"""Blocks: the new tokens of a forward pass, one row per sequence, and where they belong.

Legend: B rows, T tokens of a block, L layers, H query heads, D head dim, E hidden size.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.model.cache import Cache
from minitri.model.llama import Llama
from minitri.settings import LONGEST_BLOCK


@dataclass(frozen=True)
class Block:
    """What a forward pass reads: a block of tokens per row, each (B, T) int64 on the device."""

    tokens_BT: Tensor
    positions_BT: Tensor
    """Where the tokens stand, for the rotary embedding."""
    slots_BT: Tensor | None
    """Where they belong in the cache; None: the pass goes by the cache's lengths on the host."""

    def with_guesses(self, places_BN: Tensor, tokens_BN: Tensor) -> Self:
        """This block with other tokens at these places; those past its end are left out."""
        if not tokens_BN.shape[1]:
            return self
        padded_BT = F.pad(self.tokens_BT, (0, 1))
        places_BN = places_BN.clamp(max=self.tokens_BT.shape[1])
        return replace(self, tokens_BT=padded_BT.scatter(1, places_BN, tokens_BN)[:, :-1])


def read_block(
    model: Llama,
    blocks: list[list[int]],
    cache: Cache,
    queries_LBTHD: Tensor | None = None,
    *,
    is_prompt: bool = False,
) -> Tensor:
    """Final hidden states (B, T, E) of one block per row after what the cache holds.

    T is the length of the longest block. The cache's lengths stay as they are.
    """
    block = make_block(model, blocks, cache, max(map(len, blocks)))
    return forward_block(model, block, cache, queries_LBTHD, is_prompt=is_prompt)


def forward_block(
    model: Llama,
    block: Block,
    cache: Cache,
    queries_LBTHD: Tensor | None,
    rule_TT: Tensor | None = None,
    *,
    is_prompt: bool = False,
) -> Tensor:
    """Final hidden states (B, T, E) of a block; see `Llama.forward`."""
    where = (block.positions_BT, cache, rule_TT, block.slots_BT)
    return model.forward(block.tokens_BT, *where, queries_LBTHD, is_prompt=is_prompt)


def make_block(
    model: Llama, blocks: list[list[int]], cache: Cache, size: int, depths_T: Tensor | None = None
) -> Block:
    """The blocks, padded to `size` tokens, after what the cache holds; sent in one transfer."""
    packed_3BT = pack_block(model, blocks, cache, size, depths_T)
    return unpack_block(packed_3BT.to(model.device, non_blocking=True))


def unpack_block(packed_3BT: Tensor) -> Block:
    """What `pack_block` packed, which is now on the device of the model."""
    tokens_BT, positions_BT, slots_BT = packed_3BT
    on_device = reads_slots(packed_3BT.device, packed_3BT.shape[2])
    return Block(tokens_BT, positions_BT, slots_BT if on_device else None)


def pack_block(
    model: Llama, blocks: list[list[int]], cache: Cache, size: int, depths_T: Tensor | None = None
) -> Tensor:
    """Tokens, positions and slots (3, B, T) of a block, on the host.

    `depths_T` are the places of a tree's tokens in the text, after the next position; in a chain
    each stands after the one before.
    """
    tokens_BT = torch.tensor([row + [0] * (size - len(row)) for row in blocks])
    # A drafter may lack the last tokens of the target's vocabulary; what it reads in their place
    # changes only how well it guesses.
    tokens_BT.clamp_(max=model.config.vocab_size - 1)
    offsets_T = torch.arange(size)
    depths_T = offsets_T if depths_T is None else depths_T
    positions_BT = torch.tensor(cache.next_positions).unsqueeze(1) + depths_T
    slots_BT = torch.tensor(cache.lengths).unsqueeze(1) + offsets_T
    return torch.stack((tokens_BT, positions_BT, slots_BT))


def take_rows(rows_BTX: Tensor, index_BN: Tensor) -> Tensor:
    """Of each row of a batch the vectors (B, N, X) at these places, copied."""
    return rows_BTX.gather(1, index_BN.unsqueeze(2).expand(-1, -1, rows_BTX.shape[2]))


def reads_slots(device: torch.device, size: int) -> bool:
    """Whether a pass over blocks of this many tokens learns on the device where they belong."""
    return device.type == "cuda" and size <= LONGEST_BLOCK
