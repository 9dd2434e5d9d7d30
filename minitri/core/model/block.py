"""From token lists to the block of a forward pass: tokens, positions and cache slots.
Legend: B rows, T tokens of a block, L layers, H query heads, D head dim, E hidden size.
"""

import torch
from torch import Tensor

from minitri.core.model.cache import Cache
from minitri.core.model.llama import Block, Llama
from minitri.core.settings import LONGEST_BLOCK


def read_block(
    model: Llama,
    blocks: list[list[int]],
    cache: Cache,
    queries_LBTHD: Tensor | None = None,
    *,
    is_prompt: bool = False,
) -> Tensor:
    """Reads a token list per row by `Llama.forward`; returns final hidden states (B, T, E)."""
    block = make_block(model, blocks, cache)
    return model.forward(block, cache, None, queries_LBTHD, is_prompt=is_prompt)


def make_block(model: Llama, blocks: list[list[int]], cache: Cache) -> Block:
    """The block of one token list per row, padded, sent to the device in one transfer."""
    packed_4BT = pack_block(model, blocks, cache, max(map(len, blocks)))
    return unpack_block(packed_4BT.to(model.device, non_blocking=True))


def unpack_block(packed_4BT: Tensor) -> Block:
    """The `Block` in a tensor of `pack_block` that is now on the model's device.
    Short blocks on a GPU take their slots from it, as a CUDA graph may hold the pass."""
    tokens_BT, positions_BT, slots_BT, _ = packed_4BT
    has_slots = packed_4BT.is_cuda and packed_4BT.shape[2] <= LONGEST_BLOCK
    return Block(tokens_BT, positions_BT, slots_BT if has_slots else None)


def pack_block(
    model: Llama, blocks: list[list[int]], cache: Cache, size: int, depths: list[int] | None = None
) -> Tensor:
    """Packs a token list per row into one tensor (4, B, T) on the host, for one transfer.
    It has token ids, positions, slots, and the places of outputs, from each row's last token on.
    Token i has position `depths[i]` after the cached ones; by default i, as in a chain."""
    # A drafter may lack the last tokens of the target's vocabulary, and guesses worse after them.
    last = model.config.vocab_size - 1
    places = range(size)
    tokens = [[min(token, last) for token in row] + [0] * (size - len(row)) for row in blocks]
    positions = [[start + depth for depth in depths or places] for start in cache.next_positions]
    slots = [[length + place for place in places] for length in cache.lengths]
    outputs = [[len(row) - 1 + place for place in places] for row in blocks]
    return torch.tensor([tokens, positions, slots, outputs])


def empty_queries(model: Llama, batch_size: int, num_tokens: int) -> Tensor:
    """Buffer (L, B, T, H, D) for the rotated queries of all layers, see `Llama.forward`."""
    config = model.config
    shape = (config.num_layers, batch_size, num_tokens, config.num_heads, config.head_dim)
    return torch.empty(shape, dtype=model.dtype, device=model.device)
