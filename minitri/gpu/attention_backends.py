"""Attention on a GPU: backends for short blocks, and which of them a model uses.

For short blocks row lengths are read on the device, so the host never waits, shapes never change,
and a CUDA graph can replay it. `choose_attention` takes the first of these that works on this very
device and agrees with the oracle:

- `triton`: our own kernel, see `kernels/flash_decoding.py`;
- `flash`: FlashAttention-2 from the flash-attn package; it takes no float32, and trees go to our
  own kernel. It comes first where graphs replay it faster;
- `math`: plain formulas over all slots with a mask.

Longer blocks, which only a prefill has, go to `attend_fused` by their lengths on the host.

Legend: B batch, S slots, K KV heads, H query heads, G = H / K, D head dim, T new tokens, R = G T.
"""

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.config import ModelConfig
from minitri.errors import InputError
from minitri.gpu.graphs import GraphPool
from minitri.gpu.kernels import problem_with
from minitri.gpu.streams import CudaClock
from minitri.model.attention import attend_math, block_rule, row_by_row
from minitri.settings import LONGEST_BLOCK

log = logging.getLogger("minitri")

BACKENDS = ("triton", "flash", "math")
"""In order of preference."""

Backend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention (B, T, H, D) of a short block: q_BTHD, keys_BKSD, values_BKSD, lengths_B, rule_TT."""

TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 0.003, torch.float32: 1e-4}
"""The largest error of outputs around 1 that rounding explains."""


def attend_masked(
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    lengths_B: Tensor,
    rule_TT: Tensor | None = None,
) -> Tensor:
    """The `math` backend: all slots, masked, in float32 or better."""
    T, _, D = q_BTHD.shape[1:]
    K, S = keys_BKSD.shape[1:3]
    exact = torch.promote_types(q_BTHD.dtype, torch.float32)
    # Slot s is in the block if 0 <= s - length < T. After it may be anything, even NaN.
    offsets_BS = torch.arange(S, device=q_BTHD.device) - lengths_B.unsqueeze(1)
    is_after_BS = offsets_BS >= T
    rule_TBS = block_rule(T, rule_TT, q_BTHD.device)[:, offsets_BS.clamp(0, T - 1)]
    sees_BTS = ((offsets_BS < 0) | ~is_after_BS & rule_TBS).transpose(0, 1)
    k_BK1SD, v_BK1SD = (
        slots.to(exact).masked_fill(is_after_BS[:, None, :, None], 0).unsqueeze(2)
        for slots in (keys_BKSD, values_BKSD)
    )
    q_BKGTD = q_BTHD.transpose(1, 2).unflatten(1, (K, -1)).to(exact)
    scores_BKGTS = q_BKGTD @ k_BK1SD.transpose(3, 4) / math.sqrt(D)
    probs_BKGTS = scores_BKGTS.masked_fill(~sees_BTS[:, None, None], -math.inf).softmax(-1)
    return (probs_BKGTS @ v_BK1SD).flatten(1, 2).transpose(1, 2).to(q_BTHD.dtype)


def attend_flash(
    kernel: Callable[..., Tensor],
    attend_tree: Backend,
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    lengths_B: Tensor,
    rule_TT: Tensor | None = None,
) -> Tensor:
    """The `flash` backend: `kernel` is flash_attn's `flash_attn_with_kvcache`."""
    if rule_TT is not None:
        return attend_tree(q_BTHD, keys_BKSD, values_BKSD, lengths_B, rule_TT)
    k_BSKD, v_BSKD = (slots.transpose(1, 2) for slots in (keys_BKSD, values_BKSD))
    ends_B = (lengths_B + q_BTHD.shape[1]).int()
    return kernel(q_BTHD, k_BSKD, v_BSKD, cache_seqlens=ends_B, causal=True)


def attend_fused(
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    prefix_lengths: list[int],
    rule_TT: Tensor | None = None,
    lengths_B: Tensor | None = None,  # noqa: ARG001 (the contract's)
) -> Tensor:
    """PyTorch's fused attention, one kernel over prefix and block, by lengths on the host."""
    if min(prefix_lengths) < max(prefix_lengths):
        return row_by_row(attend_fused, q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)
    T = q_BTHD.shape[1]
    end = prefix_lengths[0] + T
    mask = None
    if rule_TT is not None:
        mask = F.pad(rule_TT, (end - T, 0), value=True)
    elif T > 1:
        from torch.nn.attention.bias import causal_lower_right  # here: the import takes seconds

        mask = causal_lower_right(T, end)
    q_BHTD = q_BTHD.transpose(1, 2)
    k_BKSD = keys_BKSD[:, :, :end]
    v_BKSD = values_BKSD[:, :, :end]
    H, K = q_BHTD.shape[1], k_BKSD.shape[1]
    if q_BTHD.dtype == torch.float32:
        # Its only fused kernel knows no groups; plain formulas would hold all scores.
        k_BKSD, v_BKSD = (it.repeat_interleave(H // K, 1) for it in (k_BKSD, v_BKSD))
    attend = F.scaled_dot_product_attention
    is_grouped = k_BKSD.shape[1] < H
    out_BHTD = attend(q_BHTD, k_BKSD, v_BKSD, attn_mask=mask, enable_gqa=is_grouped)
    return out_BHTD.transpose(1, 2)


@dataclass(frozen=True)
class GpuAttention:
    """The `Attend` of a model on a GPU: a backend for short blocks, `attend_fused` for others."""

    backend: Backend = attend_masked
    name: str = "math"

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
            return attend_fused(q_BTHD, keys_BKSD, values_BKSD, prefix_lengths, rule_TT)
        return self.backend(q_BTHD, keys_BKSD, values_BKSD, lengths_B, rule_TT)


def make_backend(name: str) -> Backend:
    """A backend by its name. Raises whatever importing it does."""
    if name == "triton":
        from minitri.gpu.kernels.flash_decoding import attend_short_block

        return attend_short_block
    if name == "math":
        return attend_masked
    from flash_attn import flash_attn_with_kvcache

    return partial(attend_flash, flash_attn_with_kvcache, make_backend("triton"))


def choose_attention(
    device: torch.device, dtype: torch.dtype, config: ModelConfig, *, wanted: str = "auto"
) -> GpuAttention:
    """The first of `BACKENDS` that is there and right, or the one that is `wanted`.

    Why another one cannot be used is a warning. Raises `InputError` if none is left.
    """
    names = [name for name in BACKENDS if name != "flash" or dtype != torch.float32]
    if wanted != "auto":
        names = [wanted]
    elif "flash" in names and find_spec("flash_attn") is not None:
        names[:2] = sorted(names[:2], key=partial(replay_seconds, device, dtype, config))
    problem = ""
    for name in names:
        make = partial(make_backend, name)
        problem = problem_with(partial(check_backend, make, device, dtype, config))
        if not problem:
            return GpuAttention(make(), name)
        if wanted == "auto":
            log.warning("attention %s is not used on %s (%s)", name, device, problem)
    raise InputError(
        f"--attention {wanted} fails on {device} in {dtype} ({problem}); use --attention auto, or "
        "--device cpu"
    )


@torch.inference_mode()
def replay_seconds(
    device: torch.device, dtype: torch.dtype, config: ModelConfig, name: str
) -> float:
    """What a backend takes for blocks of one token and of the most, each over 1 GiB of K and V and
    replayed by a graph; infinity if it fails."""
    clock, times = CudaClock(), list[float]()
    K, D = config.num_kv_heads, config.head_dim
    S = (1 << 29) // (K * D * dtype.itemsize)
    with contextlib.suppress(Exception):
        attend = make_backend(name)
        for T in (1, LONGEST_BLOCK):
            keys_BKSD, values_BKSD = torch.zeros(2, 1, K, S, D, dtype=dtype, device=device)
            q_BTHD = keys_BKSD.new_zeros(1, T, config.num_heads, D)
            lengths_B = torch.tensor([S - T], device=device)
            run = partial(attend, q_BTHD, keys_BKSD, values_BKSD, lengths_B, None)
            replay, _ = GraphPool(device).record(run)
            replay()
            start = clock.now()
            replay()
            clock.since(start, times.append)
            clock.settle()
    return sum(times) if len(times) == 2 else math.inf


def check_backend(
    make: Callable[[], Backend],
    device: torch.device,
    dtype: torch.dtype,
    config: ModelConfig,
    block_sizes: tuple[int, ...] = (1, 3, 9, LONGEST_BLOCK),
) -> None:
    """Raises an error if a backend cannot be made, or differs from the oracle, on long, short and
    empty prefixes, of chains and of trees."""
    S = 2048
    lengths = [1900, 0, 700]
    K = config.num_kv_heads
    for T in block_sizes:
        generator = torch.Generator().manual_seed(0)
        q_BTHD, keys_BKSD, values_BKSD = (
            torch.randn(3, *shape, config.head_dim, generator=generator).to(device, dtype)
            for shape in ((T, config.num_heads), (K, S), (K, S))
        )
        wide = (q_BTHD.double(), keys_BKSD.double(), values_BKSD.double())
        some_TT = torch.rand(T, T, generator=generator) < 0.3
        tree_TT = (torch.eye(T, dtype=torch.bool) | some_TT.tril()).to(device)
        for rule_TT in (None, tree_TT):
            lengths_B = torch.tensor(lengths, device=device)
            got = make()(q_BTHD, keys_BKSD, values_BKSD, lengths_B, rule_TT)
            exact = attend_math(*wide, lengths, rule_TT)
            torch.testing.assert_close(got.double(), exact, rtol=0, atol=TOLERANCES[dtype])
