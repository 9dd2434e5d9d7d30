"""Attention on a GPU: backends for short blocks, and the choice of one.

A backend reads row lengths on the device, so that a CUDA graph can capture it: `triton`, our own
kernel, see `kernels/flash_decoding.py`; `flash`, FlashAttention-2 of the flash-attn package, which
takes no float32; or `math`, plain formulas over all slots with a mask, where our kernel does not
work. Longer blocks, which only a prefill has, go to PyTorch's FlashAttention-2; where that does not
work, as in float32, the backend reads them in pieces.
Legend: B batch, S slots, K KV heads, H query heads, G = H / K, D head dim, T new tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minitri.core.config import ModelConfig
from minitri.core.errors import InputError
from minitri.core.log import log
from minitri.core.model.attention import block_mask
from minitri.core.settings import LONGEST_BLOCK
from minitri.devices.gpu.kernels import problem_with

Backend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention (B, T, H, D) of a short block, from q_BTHD, keys_BKSD, values_BKSD, lengths_B and a
mask_TT: see `model/attention.py`."""

# By dtype the largest errors of outputs around 1 that rounding explains.
TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 0.003, torch.float32: 1e-4}


def attend_masked(
    q_BTHD: Tensor,
    keys_BKSD: Tensor,
    values_BKSD: Tensor,
    lengths_B: Tensor,
    mask_TT: Tensor | None = None,
) -> Tensor:
    """The `math` backend: attention (B, T, H, D), in float32 or better. Row b's queries see its
    first `lengths_B[b]` slots and, of the T after them, those in `mask_TT` (None: causal)."""
    T, _, D = q_BTHD.shape[1:]
    K, S = keys_BKSD.shape[1:3]
    exact = torch.promote_types(q_BTHD.dtype, torch.float32)
    # Slot s is in the block if 0 <= s - length < T. Later slots may have any number, even NaN.
    offsets_BS = torch.arange(S, device=q_BTHD.device) - lengths_B.unsqueeze(1)
    is_after_BS = offsets_BS >= T
    mask_TBS = block_mask(T, mask_TT, q_BTHD.device)[:, offsets_BS.clamp(0, T - 1)]
    sees_BTS = ((offsets_BS < 0) | ~is_after_BS & mask_TBS).transpose(0, 1)
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
    mask_TT: Tensor | None = None,
) -> Tensor:
    """The `flash` backend: attention (B, T, H, D) by `kernel`, flash_attn_with_kvcache; with masks
    by `attend_tree`. Row b's first `lengths_B[b]` slots are its prefix, the next T the block."""
    if mask_TT is not None:
        return attend_tree(q_BTHD, keys_BKSD, values_BKSD, lengths_B, mask_TT)
    k_BSKD, v_BSKD = (slots.transpose(1, 2) for slots in (keys_BKSD, values_BKSD))
    ends_B = (lengths_B + q_BTHD.shape[1]).int()
    return kernel(q_BTHD, k_BSKD, v_BSKD, cache_seqlens=ends_B, causal=True)


@dataclass(frozen=True)
class GpuAttention:
    """Attention of a model on a GPU: a backend for short blocks, FlashAttention-2 for others."""

    backend: Backend = attend_masked
    name: str = "math"

    def __call__(
        self,
        q_BTHD: Tensor,
        keys_BKSD: Tensor,
        values_BKSD: Tensor,
        prefix_lengths: list[int],
        mask_TT: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> Tensor:
        slots = (keys_BKSD, values_BKSD)
        if lengths_B is not None:
            return self.backend(q_BTHD, *slots, lengths_B, mask_TT)
        assert mask_TT is None
        is_known = q_BTHD.dtype != torch.float32 and q_BTHD.shape[3] in range(8, 257, 8)
        if is_known and torch.cuda.get_device_capability(q_BTHD.device) >= (8, 0):
            [length] = {*prefix_lengths}
            valid = (part[:, :, : length + q_BTHD.shape[1]] for part in slots)
            # Here causal lets the last token see all slots. A mask would need another kernel.
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(q_BTHD.transpose(1, 2), *valid, is_causal=True)[0].transpose(1, 2)
        lengths_B = torch.tensor(prefix_lengths, device=q_BTHD.device)
        pieces = enumerate(q_BTHD.split(LONGEST_BLOCK, 1))
        outs = [self.backend(q, *slots, lengths_B + i * LONGEST_BLOCK, None) for i, q in pieces]
        return torch.cat(outs, 1)


def make_backend(name: str) -> Backend:
    """The backend `math`, `triton` or `flash`. Raises any error of an import that fails."""
    if name == "math":
        return attend_masked
    from minitri.devices.gpu.kernels.flash_decoding import attend_short_block

    if name == "triton":
        return attend_short_block
    from flash_attn import flash_attn_with_kvcache

    return partial(attend_flash, flash_attn_with_kvcache, attend_short_block)


def choose_attention(
    device: torch.device, dtype: torch.dtype, config: ModelConfig, *, wanted: str = "auto"
) -> GpuAttention:
    """Attention by the `wanted` backend; auto: `triton`, or `math` with a warning.
    Raises `InputError` if the wanted backend fails."""
    name = "triton" if wanted == "auto" else wanted
    problem = problem_with(lambda: check_backend(make_backend(name), device, dtype, config))
    if not problem:
        return GpuAttention(make_backend(name), name)
    if wanted == "auto":
        log.warning("attention triton is not used on %s (%s); it is slow", device, problem)
        return GpuAttention()
    where = f"{device} in {dtype}"
    raise InputError(f"attention={wanted} fails on {where} ({problem}); use attention=auto")


def check_backend(
    attend: Backend, device: torch.device, dtype: torch.dtype, config: ModelConfig
) -> None:
    """Raises an error if a backend differs from `attend_masked` in float64, on chains or trees."""
    lengths_B = torch.tensor([1900, 0, 700], device=device)
    generator = torch.Generator().manual_seed(0)
    for T in (1, 3, 9, LONGEST_BLOCK):
        q, k, v = (
            torch.randn(3, *shape, config.head_dim, generator=generator).to(device, dtype)
            for shape in ((T, config.num_heads), *[(config.num_kv_heads, 2048)] * 2)
        )
        tree_TT = (torch.rand(T, T, generator=generator) < 0.3).tril().fill_diagonal_(True)
        for mask_TT in (None, tree_TT.to(device)):
            got = attend(q, k, v, lengths_B, mask_TT)
            exact = attend_masked(q.double(), k.double(), v.double(), lengths_B, mask_TT)
            torch.testing.assert_close(got.double(), exact, rtol=0, atol=TOLERANCES[dtype])
