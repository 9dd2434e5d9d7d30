"""Attention by prefix + block: a query sees the prefix and, by a rule, a part of the block.

A forward pass has T new tokens per row, whose keys and values are in the cache already, right after
the row's prefix: prefill, decoding, verification and trees are one call with different T and rules.
The rule is causal (None) or a (T, T) boolean tensor, True where a query (row) may see a key of the
block (column). `Attend` is the contract, `attend_math` the oracle of all tests.
Legend: B batch, S slots, K KV heads, H query heads, G = H / K, D head dim, T new tokens.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Attend = Callable[..., Tensor]
"""Attention, called as `attend_math` is: softmax with scale 1 / sqrt(D), (B, T, H, D) in the
queries' dtype. The first `prefix_lengths[b] + T` slots of row b are valid, the last T of them the
block; other slots, even NaN, change nothing. `lengths_B`: prefix lengths on the device, if T is
small."""


def attend_math(
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    prefix_lengths: list[int],
    rule_TT: Tensor | None = None,
    lengths_B: Tensor | None = None,  # noqa: ARG001 (part of the contract)
) -> Tensor:
    """Reference attention in plain PyTorch: float32, or float64 for float64 tensors."""
    if min(prefix_lengths) < max(prefix_lengths):
        return row_by_row(attend_math, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)
    T, H, D = q_BTHD.shape[1:]
    end = prefix_lengths[0] + T
    exact = torch.promote_types(q_BTHD.dtype, torch.float32)
    G = H // keys_BKSD.shape[1]
    slots = (keys_BKSD[:, :, :end], values_BKSD[:, :, :end])
    k_BHSD, v_BHSD = (part.to(exact).repeat_interleave(G, 1) for part in slots)
    scores_BHTS = q_BTHD.transpose(1, 2).to(exact) @ k_BHSD.transpose(2, 3) / math.sqrt(D)
    scores_BHTS[..., -T:].masked_fill_(~block_rule(T, rule_TT, q_BTHD.device), -math.inf)
    return (scores_BHTS.softmax(-1) @ v_BHSD).transpose(1, 2).to(q_BTHD.dtype)


def row_by_row(
    attend: Attend,
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    lengths: list[int],
    rule_TT: Tensor | None,
) -> Tensor:
    """Attention of rows with different prefix lengths, by one call of `attend` per row."""
    rows = zip(q_BTHD.split(1), keys_BKSD.split(1), values_BKSD.split(1), lengths, strict=True)
    return torch.cat([attend(q, k, v, [length], rule_TT) for q, k, v, length in rows])


def block_rule(T: int, rule_TT: Tensor | None, device: torch.device) -> Tensor:
    """Boolean (T, T): which token of a block sees which; causal if `rule_TT` is None."""
    if rule_TT is not None:
        return rule_TT
    return torch.ones(T, T, dtype=torch.bool, device=device).tril_()
