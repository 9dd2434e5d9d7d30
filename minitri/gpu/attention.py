"""Attention on a GPU. For short blocks row lengths are read on the device, so the host never waits,
shapes never change, and a CUDA graph can replay it.

`GpuAttention` takes short blocks to one of four backends, which `backend_choice.py` chooses:

- `flash-attn`: `flash_attn_with_kvcache`, one kernel over prefix and block, for causal blocks;
- `triton`: our own kernel of that kind, see `kernels/attention.py`;
- `torch-flash`: PyTorch's FlashAttention-2 for packed sequences. It does not split a sequence, so
  the prefix is presented as several, lest most of a GPU be idle; the block is computed apart, and
  all is merged by log-sum-exp;
- `math`: plain formulas over all slots with a mask, where none of the others works.

Longer blocks, which only a prefill has, go to `attend_fused` by their lengths on the host.

Legend: B batch, S slots, K KV heads, H query heads, G = H / K, D head dim, T new tokens, R = G T,
P pieces.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.model.attention import block_rule, fold, row_by_row, unfold

SHORTEST_PIECE = 256
"""Slots per piece of a prefix, at least; shorter pieces gain no speed."""

Varlen = Callable[..., tuple[Tensor, Tensor]]
"""A kernel for packed sequences: the signature and the contract of `torch_varlen`."""


class ShortBlock(NamedTuple):
    """The arguments of `model.attention.Attend`, but lengths are on the device only."""

    q_BTHD: Tensor
    keys_BKSD: Tensor
    values_BKSD: Tensor
    lengths_B: Tensor
    rule_TT: Tensor | None = None


class Backend(Protocol):
    """A way to compute attention of short blocks."""

    name: str
    only_causal: bool = False
    """Whether it takes no rule but the causal one."""

    def __call__(self, block: ShortBlock) -> Tensor: ...


class GpuAttention:
    """The `Attend` of a model on a GPU: a backend for short blocks, `attend_fused` for others."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(
        self, q_BTHD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, prefix_lengths: list[int],
        rule_TT: Tensor | None = None, lengths_B: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if lengths_B is None:
            return attend_fused(q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)
        backend = Math() if rule_TT is not None and self.backend.only_causal else self.backend
        return backend(ShortBlock(q_BTHD, keys_BKSD, values_BKSD, lengths_B, rule_TT))


def attend_fused(
    q_BTHD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, prefix_lengths: list[int],
    rule_TT: Tensor | None = None, lengths_B: Tensor | None = None,  # noqa: ARG001 (the contract's)
) -> Tensor:  # fmt: skip
    """PyTorch's fused attention, one kernel over prefix and block, by lengths on the host."""
    if min(prefix_lengths) < max(prefix_lengths):
        return row_by_row(attend_fused, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)
    T, end = q_BTHD.shape[1], prefix_lengths[0] + q_BTHD.shape[1]
    mask = None
    if rule_TT is not None:
        mask = F.pad(rule_TT, (end - T, 0), value=True)
    elif T > 1:
        from torch.nn.attention.bias import causal_lower_right  # here: the import takes seconds

        mask = causal_lower_right(T, end)
    k_BKSD, v_BKSD = keys_BKSD[:, :, :end], values_BKSD[:, :, :end]

    def attend(q_BTHD: Tensor, *, is_grouped: bool) -> Tensor:
        q_BHTD = q_BTHD.transpose(1, 2)
        out_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BKSD, v_BKSD, attn_mask=mask, enable_gqa=is_grouped
        )
        return out_BHTD.transpose(1, 2)

    H, K = q_BTHD.shape[2], keys_BKSD.shape[1]
    if H == K or q_BTHD.dtype != torch.float32:
        return attend(q_BTHD, is_grouped=H > K)
    # The only fused kernel for float32 knows no groups; plain formulas would hold all scores.
    groups = q_BTHD.unflatten(2, (K, H // K)).unbind(3)
    return torch.stack([attend(one, is_grouped=False) for one in groups], 3).flatten(2, 3)


class Math(Backend):
    """All slots, masked, in float32 or better."""

    name = "math"

    def __call__(self, block: ShortBlock) -> Tensor:
        q_BTHD, keys_BKSD, values_BKSD, lengths_B, rule_TT = block
        B, T, H, D = q_BTHD.shape
        K, S = keys_BKSD.shape[1:3]
        exact = torch.promote_types(q_BTHD.dtype, torch.float32)
        q_BKRD = fold(q_BTHD, K).to(exact) / math.sqrt(D)
        # Slot s is in the block if 0 <= s - length < T. Behind it may be anything, even NaN.
        offsets_BS = torch.arange(S, device=q_BTHD.device) - lengths_B.unsqueeze(1)
        behind_B1S1 = (offsets_BS >= T)[:, None, :, None]
        rule_TT = block_rule(T, rule_TT, q_BTHD.device)
        rule_TX = F.pad(F.pad(rule_TT, (1, 0), value=True), (0, 1))  # prefix, block, what is behind
        unseen_BTS = ~rule_TX[:, offsets_BS.clamp(-1, T) + 1].transpose(0, 1)
        unseen_BKRS = unseen_BTS[:, None, None].expand(B, K, H // K, T, S).flatten(2, 3)
        scores_BKRS = q_BKRD @ keys_BKSD.to(exact).masked_fill(behind_B1S1, 0).transpose(2, 3)
        probs_BKRS = scores_BKRS.masked_fill(unseen_BKRS, -math.inf).softmax(-1)
        out_BKRD = probs_BKRS @ values_BKSD.to(exact).masked_fill(behind_B1S1, 0)
        return unfold(out_BKRD, T).to(q_BTHD.dtype)


class TorchFlash(Backend):
    """The prefix in pieces, by a kernel for packed sequences; the block apart."""

    name = "torch-flash"

    def __init__(self, kernel: Varlen, *, num_processors: int) -> None:
        self._kernel = kernel
        self._num_processors = num_processors

    def __call__(self, block: ShortBlock) -> Tensor:
        q_BKRD = fold(block.q_BTHD, block.keys_BKSD.shape[1])
        outs_PBKRD, lses_PBKR = self._prefix(q_BKRD, block)
        out_BKRD, lse_BKR = attend_block_alone(q_BKRD, block)
        shares_PBKR = torch.cat((lses_PBKR, lse_BKR.unsqueeze(0))).softmax(0)
        all_PBKRD = torch.cat((outs_PBKRD.float(), out_BKRD.unsqueeze(0)))
        merged_BKRD = (all_PBKRD * shares_PBKR.unsqueeze(-1)).sum(0)
        return unfold(merged_BKRD, block.q_BTHD.shape[1]).to(q_BKRD.dtype)

    def _prefix(self, q_BKRD: Tensor, block: ShortBlock) -> tuple[Tensor, Tensor]:
        """Outputs (P, B, K, R, D) and log-sum-exps (P, B, K, R); empty pieces weigh 0."""
        B, K, R, D = q_BKRD.shape
        S, device = block.keys_BKSD.shape[2], q_BKRD.device
        wanted = 2 * self._num_processors // (B * K)  # more than that would take another wave
        P = max(1, min(wanted, S // SHORTEST_PIECE))
        size = -(-S // P)
        # Slot s of row b and head k lies at b * row + k * head + s * token. Read as packed tokens,
        # row b begins at b * row / token.
        row, head, token, _ = block.keys_BKSD.stride()
        assert block.values_BKSD.stride() == (row, head, token, 1)
        assert row % token == 0
        packed = (((B - 1) * (row // token) + S, K, D), (token, head, 1))
        k, v = (slots.as_strided(*packed) for slots in (block.keys_BKSD, block.values_BKSD))
        firsts_P1 = torch.arange(P, device=device).unsqueeze(1) * size
        begins_PB = firsts_P1 + torch.arange(B, device=device) * (row // token)
        begins_N = torch.cat((begins_PB.flatten(), begins_PB[-1:, -1] + size)).int()
        counts_PB = (block.lengths_B - firsts_P1).clamp(0, size)
        num = torch.arange(P * B + 1, device=device, dtype=torch.int32)
        q_QKD = q_BKRD.transpose(1, 2).expand(P, B, R, K, D).reshape(P * B * R, K, D)
        out_QKD, lse_KQ = self._kernel(
            q_QKD, k, v, num * R, begins_N, counts_PB.flatten().int(), R, size, 1 / math.sqrt(D)
        )
        is_empty_PB11 = (counts_PB == 0)[:, :, None, None]
        outs_PBKRD = out_QKD.view(P, B, R, K, D).transpose(2, 3)
        lses_PBKR = lse_KQ.view(K, P, B, R).permute(1, 2, 0, 3)
        lses_PBKR = lses_PBKR.masked_fill(is_empty_PB11, -math.inf)
        return outs_PBKRD.masked_fill(is_empty_PB11.unsqueeze(-1), 0), lses_PBKR


def attend_block_alone(q_BKRD: Tensor, block: ShortBlock) -> tuple[Tensor, Tensor]:
    """Output (B, K, R, D) and log-sum-exp (B, K, R) without the prefix, in float32."""
    (B, K, R, D), T = q_BKRD.shape, block.q_BTHD.shape[1]
    places_BT = block.lengths_B.unsqueeze(1) + torch.arange(T, device=q_BKRD.device)
    index_BKTD = places_BT[:, None, :, None].expand(B, K, T, D)
    k_BKTD = block.keys_BKSD.gather(2, index_BKTD).float()
    v_BKTD = block.values_BKSD.gather(2, index_BKTD).float()
    scores_BKRT = q_BKRD.float() @ k_BKTD.transpose(2, 3) / math.sqrt(D)
    unseen_RT = ~block_rule(T, block.rule_TT, q_BKRD.device).repeat(R // T, 1)
    scores_BKRT = scores_BKRT.masked_fill(unseen_RT, -math.inf)
    return scores_BKRT.softmax(-1) @ v_BKTD, scores_BKRT.logsumexp(-1)


class FlashAttn(Backend):
    """The flash-attn package."""

    name = "flash-attn"
    only_causal = True

    def __init__(self) -> None:
        from flash_attn import flash_attn_with_kvcache

        self._kernel = flash_attn_with_kvcache

    def __call__(self, block: ShortBlock) -> Tensor:
        assert block.rule_TT is None
        ends_B = (block.lengths_B + block.q_BTHD.shape[1]).int()
        k_BSKD, v_BSKD = block.keys_BKSD.transpose(1, 2), block.values_BKSD.transpose(1, 2)
        return self._kernel(block.q_BTHD, k_BSKD, v_BSKD, cache_seqlens=ends_B, causal=True)


class TritonAttention(Backend):
    """Our own kernel."""

    name = "triton"

    def __init__(self, *, num_processors: int) -> None:
        from minitri.gpu.kernels.attention import attend_short_block

        self._kernel = attend_short_block
        self._num_processors = num_processors

    def __call__(self, block: ShortBlock) -> Tensor:
        return self._kernel(*block, self._num_processors)


def torch_varlen(
    q_QKD: Tensor, k: Tensor, v: Tensor, begins_q: Tensor, begins_k: Tensor, counts_k: Tensor,
    max_q: int, max_k: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """PyTorch's FlashAttention-2, without any mask, of N packed sequences with q queries each.

    Queries are (Q, K, D), Q = N q, keys and values (tokens, K, D). `begins_*` (N + 1,) say where
    each sequence's queries and keys begin, `counts_k` (N,) how many of its keys count, `max_*` the
    longest of both. Returns (Q, K, D) and log-sum-exps (K, Q), undefined where there are no keys.
    """
    sizes = (begins_q, begins_k, max_q, max_k)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q_QKD, k, v, *sizes, 0.0, False, False, scale=scale, seqused_k=counts_k
    )
    return out, lse
