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
    """Hidden states (B, T, E) of a list of new tokens per row. K and V go to `cache`; its lengths
    stay. `queries_LBTHD` gets rotated queries. `is_prompt`: same bits in blocks of any length."""
    block = make_block(model, blocks, cache)
    return model.forward(block, cache, None, queries_LBTHD, is_prompt=is_prompt)


def make_block(model: Llama, blocks: list[list[int]], cache: Cache) -> Block:
    """A `Block` on the model's device: a token list per row, padded, after the text in `cache`."""
    packed_4BT = pack_block(model, blocks, cache, max(map(len, blocks)))
    return unpack_block(packed_4BT.to(model.device, non_blocking=True))


def unpack_block(packed_4BT: Tensor) -> Block:
    """Unpacks a tensor of `pack_block` on the model's device into token ids, positions and slots.
    Slots are left out on a CPU and in long blocks, which no captured CUDA graph reads."""
    tokens_BT, positions_BT, slots_BT, _ = packed_4BT
    has_slots = packed_4BT.is_cuda and packed_4BT.shape[2] <= LONGEST_BLOCK
    return Block(tokens_BT, positions_BT, slots_BT if has_slots else None)


def pack_block(
    model: Llama, blocks: list[list[int]], cache: Cache, size: int, depths: list[int] | None = None
) -> Tensor:
    """Packs a token list per row, padded to T = `size`, into one tensor (4, B, T) on the host:
    token ids, positions, cache slots, and indices in the block from each row's last token on, where
    outputs are read. Token i has the row's next position + `depths[i]`, by default + i."""
    # A drafter may lack the last tokens of the target's vocabulary, and guesses worse after them.
    last = model.config.vocab_size - 1
    places = range(size)
    tokens = [[min(token, last) for token in row] + [0] * (size - len(row)) for row in blocks]
    positions = [[start + depth for depth in depths or places] for start in cache.next_positions]
    slots = [[length + place for place in places] for length in cache.lengths]
    outputs = [[len(row) - 1 + place for place in places] for row in blocks]
    return torch.tensor([tokens, positions, slots, outputs])


def empty_queries(model: Llama, batch_size: int, num_tokens: int) -> Tensor:
    """Uninitialised buffer (L, B, T, H, D) for rotated queries, T being `num_tokens` per row."""
    config = model.config
    shape = (config.num_layers, batch_size, num_tokens, config.num_heads, config.head_dim)
    return torch.empty(shape, dtype=model.dtype, device=model.device)
