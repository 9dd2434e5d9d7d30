"""Attention on a CPU by PyTorch's flash kernel, where there are no compiled kernels.

Prefix and block are attended to apart and merged by log-sum-exp. In the prefix nothing is masked,
so the G query heads of a KV head and the tokens are the rows of one matrix, and K and V are read
once per KV head, as they lie. A short block has too few rows for all cores: then the prefix is cut
in PIECES. What does not fill a piece is read with the block.

Legend: B batch, S slots, K KV heads (of all rows), H query heads, G = H / K, D head dim, T new
tokens, R = G T, P pieces.
"""

import math

import torch
from torch import Tensor

from minitri.model.attention import block_rule, fold, row_by_row, unfold

SHORT_BLOCK = 24
"""Longest block, in tokens, whose prefix is cut: those of decoding with ordinary gammas."""

PIECES = 4
"""Fixed, so that results do not depend on the number of cores."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend_cpu(
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    prefix_lengths: list[int],
    rule_TT: Tensor | None = None,
    lengths_B: Tensor | None = None,  # noqa: ARG001 (the contract's)
) -> Tensor:
    """Attention of a block on a CPU; the contract is `model.attention.Attend`.

    Rows of equal length are computed as one row with B times as many KV heads.
    """
    prefix = prefix_lengths[0]
    if max(prefix_lengths) > min(prefix_lengths):
        return row_by_row(attend_cpu, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)
    B, T = q_BTHD.shape[:2]
    pieces = PIECES if T <= SHORT_BLOCK else 1
    start, end = prefix // pieces * pieces, prefix + T
    q_KRD = fold(q_BTHD, keys_BKSD.shape[1]).flatten(0, 1)
    slots = (keys_BKSD.flatten(0, 1), values_BKSD.flatten(0, 1))

    q_KGTD = q_KRD.unflatten(1, (-1, T))
    block = (
        slots_KSD[:, None, start:end].expand(-1, q_KGTD.shape[1], -1, -1) for slots_KSD in slots
    )
    is_causal = rule_TT is None and start == prefix
    bias = None
    if not is_causal:
        bias = torch.zeros(T, end - start, dtype=q_BTHD.dtype)
        bias[:, -T:].masked_fill_(~block_rule(T, rule_TT, bias.device), -math.inf)
    out_KGTD, lse_KGT = _flash(q_KGTD, *block, is_causal=is_causal, attn_mask=bias)
    out_KRD = out_KGTD.flatten(1, 2)
    if start > 0:
        q_KPRD = q_KRD.unsqueeze(1).expand(-1, pieces, -1, -1)
        cut = (slots_KSD[:, :start].unflatten(1, (pieces, -1)) for slots_KSD in slots)
        out_KPRD, lse_KPR = _flash(q_KPRD, *cut)
        outs = torch.cat((out_KPRD, out_KRD.unsqueeze(1)), 1)
        lses = torch.cat((lse_KPR, lse_KGT.flatten(1).unsqueeze(1)), 1)
        out_KRD = (outs * lses.softmax(1).unsqueeze(-1)).sum(1).to(q_BTHD.dtype)
    return unfold(out_KRD.unflatten(0, (B, -1)), T)
