"""Attention by prefix + block: a query sees all of the prefix, and a mask's part of the block.

A forward pass has T new tokens per row, whose keys and values are in the cache already, right after
the row's prefix: prefill, decoding, verification and trees are one call with different T and masks.
The mask is causal (None) or a (T, T) boolean tensor, True where a query (row) sees a key of the
block (column). `Attend` is the contract, `attend_math` the oracle of all tests.
In layers with a sliding window, a cache has the token of position p in slot p modulo S.
Legend: B batch, S slots, K KV heads, H query heads, G = H / K, D head dim, T new tokens, N tokens
that a block sees through its windows, R = G T.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[..., Tensor]
"""Attention, called as `attend_math` is: softmax with scale 1 / sqrt(D), (B, T, H, D) in the
queries' dtype. Slots after a row's block, even NaN, change nothing. `lengths_B`: prefix lengths on
the device, for short blocks on a GPU."""


def attend_math(
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    prefix_lengths: list[int],
    mask_TT: Tensor | None = None,
    lengths_B: Tensor | None = None,  # noqa: ARG001 (part of the contract)
) -> Tensor:
    """Reference attention (B, T, H, D), in float32 or better; ignores `lengths_B`. Row b sees its
    first `prefix_lengths[b]` slots and, of the T after them, those in `mask_TT` (None: causal)."""
    if min(prefix_lengths) < max(prefix_lengths):
        return row_by_row(attend_math, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, mask_TT)
    T, H, D = q_BTHD.shape[1:]
    end = prefix_lengths[0] + T
    exact = torch.promote_types(q_BTHD.dtype, torch.float32)
    G = H // keys_BKSD.shape[1]
    slots = (keys_BKSD[:, :, :end], values_BKSD[:, :, :end])
    k_BHSD, v_BHSD = (part.to(exact).repeat_interleave(G, 1) for part in slots)
    scores_BHTS = q_BTHD.transpose(1, 2).to(exact) @ k_BHSD.transpose(2, 3) / math.sqrt(D)
    scores_BHTS[..., -T:].masked_fill_(~block_mask(T, mask_TT, q_BTHD.device), -math.inf)
    return (scores_BHTS.softmax(-1) @ v_BHSD).transpose(1, 2).to(q_BTHD.dtype)


def row_by_row(
    attend: Attend,
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    lengths: list[int],
    mask_TT: Tensor | None,
) -> Tensor:
    """Attention (B, T, H, D) of rows whose prefix `lengths` differ: calls `attend` for each row."""
    rows = zip(q_BTHD.split(1), keys_BKSD.split(1), values_BKSD.split(1), lengths, strict=True)
    return torch.cat([attend(q, k, v, [length], mask_TT) for q, k, v, length in rows])


def block_mask(T: int, mask_TT: Tensor | None, device: torch.device) -> Tensor:
    """Boolean (T, T), True where a new token (row) sees another: `mask_TT`, or if None causal."""
    if mask_TT is not None:
        return mask_TT
    return torch.ones(T, T, dtype=torch.bool, device=device).tril_()


class Window:
    """Attention in layers with a sliding window, in which a query sees only the latest tokens."""

    def __init__(
        self, positions_BT: Tensor, mask_TT: Tensor | None, size: int, reach: int, num_slots: int
    ) -> None:
        """A query sees `size` tokens up to itself; at most `reach` tokens precede the T new ones.
        Sets `slots_BN`: slots (position modulo `num_slots`) of all tokens seen, new ones last."""
        T = positions_BT.shape[1]
        steps_N = torch.arange(-min(reach, size - 1), T, device=positions_BT.device)
        tokens_BN = positions_BT[:, :1] + steps_N  # negative ones are before the text
        self.slots_BN = tokens_BN.clamp(min=0) % num_slots
        tokens_BN[:, -T:] = positions_BT  # in a tree siblings share a position
        sees_BTN = positions_BT.unsqueeze(2) - tokens_BN.unsqueeze(1) < size
        sees_BTN[:, :, -T:] &= block_mask(T, mask_TT, positions_BT.device)
        self._sees_BTN = sees_BTN & (tokens_BN >= 0).unsqueeze(1)

    def attend(
        self, q_BTHD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, *_lengths: object
    ) -> Tensor:
        """Attention (B, T, H, D) of queries to their windows; lengths and mask are not used."""
        T, H = q_BTHD.shape[1:3]
        K = keys_BKSD.shape[1]

        def seen(slots_BKSD: Tensor) -> Tensor:  # (B, K, N, D)
            rows = zip(slots_BKSD, self.slots_BN, strict=True)
            return torch.stack([row_KSD.index_select(1, slots_N) for row_KSD, slots_N in rows])

        q_BKRD = q_BTHD.transpose(1, 2).unflatten(1, (K, -1)).flatten(2, 3)
        sees_B1RN = self._sees_BTN.repeat(1, H // K, 1).unsqueeze(1)
        k_BKND, v_BKND = map(seen, (keys_BKSD, values_BKSD))
        out_BKRD = F.scaled_dot_product_attention(q_BKRD, k_BKND, v_BKND, sees_B1RN)
        return out_BKRD.unflatten(2, (-1, T)).flatten(1, 2).transpose(1, 2)
