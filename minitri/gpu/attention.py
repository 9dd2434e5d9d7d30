"""Attention of short blocks on a GPU: how long each row is stands in a tensor that only kernels read, so that the host
never waits, shapes never change, and a CUDA graph can replay it.

There are four backends; `choose_backend` takes the first that is there and agrees with the oracle on this very device:

- `flash-attn`: `flash_attn_with_kvcache`, one kernel over prefix and block, for chains (causal blocks);
- `triton`: our own kernel of that kind, see `attention_triton.py`;
- `torch-flash`: PyTorch's own FlashAttention-2 for packed sequences. It does not cut a sequence, and a few query rows
  of a few KV heads would leave most of a GPU idle, so the prefix is presented as several sequences of the same row;
  the block comes apart, and all is merged by log-sum-exp;
- `math`: plain formulas over all slots with a mask, for dtypes and GPUs without the others.

Longer blocks, which only a prefill has, are left to `attention.attend`.

Legend: B batch, S slots, K KV heads, H query heads, G = H / K, D head dim, T new tokens, R = G T, P pieces.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from minitri.model.attention import attend, attend_math, block_rule
from minitri.errors import InputError, shorten
from minitri.settings import MAX_GAMMA

log = logging.getLogger("minitri")

LONGEST_BLOCK = 1 + 2 * MAX_GAMMA
"""Longest block, in tokens, that comes with lengths on the device."""
SHORTEST_PIECE = 256
"""Slots below which cutting a prefix further does not pay."""

Varlen = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float], tuple[Tensor, Tensor]
]
"""Attention, without any mask, of N packed sequences: queries (N q, K, D), keys and values (tokens, K, D), where each
sequence's queries and keys begin (N + 1,), how many keys of each count (N,), the longest of both, and the scale.
Returns (N q, K, D) and the log-sum-exps (K, N q), which mean nothing for sequences without keys."""


class Backend(Protocol):
    """A way to compute it. The contract is `attention.attend`'s, with lengths (B,) of the prefixes on the device."""

    name: str
    only_chains: bool
    """Whether it takes no rule but the causal one."""

    def __call__(
        self,
        q_BTHD: Tensor,
        keys_BKSD: Tensor,
        values_BKSD: Tensor,
        lengths_B: Tensor,
        rule_TT: Tensor | None,
    ) -> Tensor: ...


class GpuAttention:
    """`attention.attend` for a model on a GPU: short blocks by a backend, others by their lengths on the host."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __call__(
        self,
        q_BTHD: Tensor,
        keys_BKSD: Tensor,
        values_BKSD: Tensor,
        prefix_lengths: list[int],
        rule_TT: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> Tensor:
        if lengths_B is None:
            return attend(q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)
        backend = Math() if rule_TT is not None and self.backend.only_chains else self.backend
        return backend(q_BTHD, keys_BKSD, values_BKSD, lengths_B, rule_TT)


class Math:
    """All slots, masked, in float32 or better."""

    name = "math"
    only_chains = False

    def __call__(
        self,
        q_BTHD: Tensor,
        keys_BKSD: Tensor,
        values_BKSD: Tensor,
        lengths_B: Tensor,
        rule_TT: Tensor | None,
    ) -> Tensor:
        B, T, H, D = q_BTHD.shape
        K, S = keys_BKSD.shape[1:3]
        exact = torch.promote_types(q_BTHD.dtype, torch.float32)
        q_BKRD = fold(q_BTHD, K).to(exact) / math.sqrt(D)
        # Key s of row b is in the block if 0 <= s - length < T; what stands behind may be anything, NaN too.
        offsets_BS = torch.arange(S, device=q_BTHD.device) - lengths_B.unsqueeze(1)
        rule = block_rule(T, rule_TT, q_BTHD.device)
        in_block_BTS = rule.t()[offsets_BS.clamp(0, T - 1)].transpose(1, 2)
        sees_BTS = torch.where(
            (offsets_BS < 0).unsqueeze(1), True, in_block_BTS & (offsets_BS < T).unsqueeze(1)
        )
        there_BS = (offsets_BS < T)[:, None, :, None]
        scores_BKRS = q_BKRD @ keys_BKSD.to(exact).masked_fill(~there_BS, 0).transpose(2, 3)
        unseen_BKRS = ~sees_BTS[:, None, None].expand(B, K, H // K, T, S).flatten(2, 3)
        probs_BKRS = scores_BKRS.masked_fill(unseen_BKRS, -math.inf).softmax(-1)
        out_BKRD = probs_BKRS @ values_BKSD.to(exact).masked_fill(~there_BS, 0)
        return unfold(out_BKRD, T).to(q_BTHD.dtype)


class TorchFlash:
    """The prefix in pieces, each a sequence of its own to a kernel for packed sequences; the block apart."""

    name = "torch-flash"
    only_chains = False

    def __init__(self, kernel: Varlen, *, num_processors: int) -> None:
        self._kernel = kernel
        self._num_processors = num_processors

    def __call__(
        self,
        q_BTHD: Tensor,
        keys_BKSD: Tensor,
        values_BKSD: Tensor,
        lengths_B: Tensor,
        rule_TT: Tensor | None,
    ) -> Tensor:
        T = q_BTHD.shape[1]
        q_BKRD = fold(q_BTHD, keys_BKSD.shape[1])
        outs, lses = self._prefix(q_BKRD, keys_BKSD, values_BKSD, lengths_B)
        block, block_lse = self._block(q_BKRD, keys_BKSD, values_BKSD, lengths_B, T, rule_TT)
        shares_PBKR = torch.cat((lses, block_lse.unsqueeze(0))).softmax(0)
        out_BKRD = (torch.cat((outs.float(), block.unsqueeze(0))) * shares_PBKR.unsqueeze(-1)).sum(
            0
        )
        return unfold(out_BKRD, T).to(q_BTHD.dtype)

    def _prefix(
        self, q_BKRD: Tensor, keys_BKSD: Tensor, values_BKSD: Tensor, lengths_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Outputs (P, B, K, R, D) and log-sum-exps (P, B, K, R) of the pieces; those that are empty weigh nothing."""
        B, K, R, D = q_BKRD.shape
        S, device = keys_BKSD.shape[2], q_BKRD.device
        wanted = -(-2 * self._num_processors // (B * K))
        P = max(1, min(wanted, S // SHORTEST_PIECE))
        size = -(-S // P)
        # A token of row b and head k lies at b * row + k * head + s * D: as packed tokens, row b begins at b * row / D.
        row, head, token, _ = keys_BKSD.stride()
        assert keys_BKSD.stride() == values_BKSD.stride()
        assert row % token == 0
        k, v = (
            slots_BKSD.as_strided(((B - 1) * (row // token) + S, K, D), (token, head, 1))
            for slots_BKSD in (keys_BKSD, values_BKSD)
        )
        firsts_P1 = torch.arange(P, device=device).unsqueeze(1) * size
        begins_PB = firsts_P1 + torch.arange(B, device=device) * (row // token)
        counts_PB = (lengths_B - firsts_P1).clamp(0, size)
        q_QKD = q_BKRD.transpose(1, 2).expand(P, B, R, K, D).reshape(P * B * R, K, D)
        num = torch.arange(P * B + 1, device=device, dtype=torch.int32)
        begins_N = torch.cat((begins_PB.flatten(), begins_PB[-1:, -1] + size)).int()
        out_QKD, lse_KQ = self._kernel(
            q_QKD, k, v, num * R, begins_N, counts_PB.flatten().int(), R, size, 1 / math.sqrt(D)
        )  # fmt: skip
        empty_PB11 = (counts_PB == 0)[:, :, None, None]
        outs = out_QKD.view(P, B, R, K, D).transpose(2, 3)
        lses = lse_KQ.view(K, P, B, R).permute(1, 2, 0, 3)
        return outs.masked_fill(empty_PB11.unsqueeze(-1), 0), lses.masked_fill(
            empty_PB11, -math.inf
        )

    @staticmethod
    def _block(
        q_BKRD: Tensor,
        keys_BKSD: Tensor,
        values_BKSD: Tensor,
        lengths_B: Tensor,
        T: int,
        rule_TT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Output (B, K, R, D) and log-sum-exp (B, K, R) over the block itself, float32."""
        B, K, R, D = q_BKRD.shape
        places_BT = lengths_B.unsqueeze(1) + torch.arange(T, device=q_BKRD.device)
        index_BKTD = places_BT[:, None, :, None].expand(B, K, T, D)
        k_BKTD, v_BKTD = (slots.gather(2, index_BKTD).float() for slots in (keys_BKSD, values_BKSD))
        scores_BKRT = q_BKRD.float() @ k_BKTD.transpose(2, 3) / math.sqrt(D)
        unseen_RT = ~block_rule(T, rule_TT, q_BKRD.device).repeat(R // T, 1)
        scores_BKRT = scores_BKRT.masked_fill(unseen_RT, -math.inf)
        return scores_BKRT.softmax(-1) @ v_BKTD, scores_BKRT.logsumexp(-1)


class FlashAttn:
    """The flash-attn package."""

    name = "flash-attn"
    only_chains = True

    def __init__(self) -> None:
        from flash_attn import flash_attn_with_kvcache

        self._kernel = flash_attn_with_kvcache

    def __call__(
        self,
        q_BTHD: Tensor,
        keys_BKSD: Tensor,
        values_BKSD: Tensor,
        lengths_B: Tensor,
        rule_TT: Tensor | None,
    ) -> Tensor:
        assert rule_TT is None
        ends_B = (lengths_B + q_BTHD.shape[1]).int()
        keys_BSKD, values_BSKD = keys_BKSD.transpose(1, 2), values_BKSD.transpose(1, 2)
        out: Tensor = self._kernel(
            q_BTHD, keys_BSKD, values_BSKD, cache_seqlens=ends_B, causal=True
        )
        return out


def fold(q_BTHD: Tensor, num_kv_heads: int) -> Tensor:
    """The query heads of a group as further rows: (B, K, G T, D)."""
    return q_BTHD.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def unfold(out_BKRD: Tensor, T: int) -> Tensor:
    """Undoes `fold`: (B, T, H, D)."""
    return out_BKRD.unflatten(2, (-1, T)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def torch_varlen(
    q_QKD: Tensor, k: Tensor, v: Tensor, begins_q: Tensor, begins_k: Tensor, counts_k: Tensor, max_q: int, max_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """PyTorch's FlashAttention-2 for packed sequences."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q_QKD,
        k,
        v,
        begins_q,
        begins_k,
        max_q,
        max_k,
        0.0,
        False,
        False,
        scale=scale,
        seqused_k=counts_k,
    )
    return out, lse


BACKENDS = ("flash-attn", "triton", "torch-flash", "math")


def make_backend(name: str, device: torch.device) -> Backend:
    """A backend by its name. Raises whatever importing it does."""
    if name == "flash-attn":
        return FlashAttn()
    if name == "math":
        return Math()
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if name == "triton":
        from minitri.gpu.triton_attention import TritonAttention

        return TritonAttention(num_processors=processors)
    return TorchFlash(torch_varlen, num_processors=processors)


def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    wanted: str = "auto",
) -> Backend:
    """The first backend that is there and right; or the one that is `wanted`, else an `InputError`."""
    for name in BACKENDS if wanted == "auto" else (wanted,):
        try:
            backend = make_backend(name, device)
            error = max(
                largest_error(backend, device, dtype, num_heads, num_kv_heads, head_dim, T)
                for T in (1, 3, 9, LONGEST_BLOCK)
            )
        except torch.OutOfMemoryError:
            raise InputError(
                f"{device} has no memory left to try attention kernels; free some of it"
            ) from None
        except Exception as failure:  # a compiler of kernels may raise anything
            reason = shorten(failure, 80)
        else:
            if error <= tolerance(dtype):
                if name == "math" != wanted and dtype != torch.float32:
                    log.warning(
                        "attention falls back to plain formulas on %s, which read KV many times slower",
                        device,
                    )
                return backend
            reason = f"it is off by {error:.2g}"
        if wanted != "auto":
            raise InputError(
                f"--attention {name} fails on {device} in {dtype} ({reason}); use --attention auto"
            )
        log.info("attention %s is not used: %s", name, reason)
    raise InputError(f"no attention backend works on {device} in {dtype}; use --device cpu")


def tolerance(dtype: torch.dtype) -> float:
    """The largest error of outputs around 1 that rounding explains."""
    return {torch.bfloat16: 0.02, torch.float16: 0.003}.get(dtype, 1e-4)


def largest_error(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    T: int,
) -> float:
    """On a ragged random case with long, short and empty prefixes, by the oracle."""
    generator = torch.Generator().manual_seed(0)
    S, lengths = 2048, [1900, 0, 700]
    q = torch.randn(3, T, num_heads, head_dim, generator=generator).to(device, dtype)
    keys, values = (
        torch.randn(3, num_kv_heads, S, head_dim, generator=generator).to(device, dtype)
        for _ in range(2)
    )
    got = backend(q, keys, values, torch.tensor(lengths, device=device), None)
    exact = attend_math(q.double(), keys.double(), values.double(), lengths)
    error = (got.double() - exact).abs().max()
    return float(error.nan_to_num(math.inf))
