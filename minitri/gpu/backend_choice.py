"""Which attention backend a GPU uses for short blocks (`attention.py`): the fastest of those that
are there and agree with the oracle, all tried on this very device and with this model's heads.

Legend: S slots, K KV heads, D head dim, T new tokens.
"""

import functools
import logging
import math
import statistics
from collections.abc import Callable, Sequence

import torch

from minitri.config import ModelConfig
from minitri.errors import InputError, shorten
from minitri.gpu.attention import (
    Backend,
    FlashAttn,
    Math,
    ShortBlock,
    TorchFlash,
    TritonAttention,
    torch_varlen,
)
from minitri.model.attention import attend_math
from minitri.model.cache import round_up_to_stride
from minitri.settings import LONGEST_BLOCK

log = logging.getLogger("minitri")

BACKENDS = ("flash-attn", "triton", "torch-flash", "math")
HALF_ONLY = ("flash-attn", "torch-flash")
"""Those that know no float32."""
TIMED_BYTES = 64 << 20
"""K and V that backends are timed with: more than caches of a GPU hold."""


def make_backend(name: str, device: torch.device) -> Backend:
    """A backend by its name. Raises whatever importing it does."""
    if name == "flash-attn":
        return FlashAttn()
    if name == "math":
        return Math()
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if name == "triton":
        return TritonAttention(num_processors=processors)
    return TorchFlash(torch_varlen, num_processors=processors)


def choose_backend(
    device: torch.device, dtype: torch.dtype, config: ModelConfig, *, wanted: str = "auto"
) -> Backend:
    """The fastest backend that is there and right; or the one that is `wanted`, else `InputError`.

    Plain formulas are the last resort. Why another one cannot be used is a warning, unless its
    package is not installed.
    """
    found: list[Backend] = []
    for name in BACKENDS if wanted == "auto" else (wanted,):
        if wanted == "auto" and (
            (name == "math" and found) or (name in HALF_ONLY and dtype == torch.float32)
        ):
            continue
        try:
            backend = make_backend(name, device)
            lengths = (1, 3, 9, LONGEST_BLOCK)
            error = max(largest_error(backend, device, dtype, config, T) for T in lengths)
            reason, level = f"it is off by {error:.2g}", logging.WARNING
        except torch.OutOfMemoryError:
            raise InputError(
                f"{device} has no memory left to try attention kernels; free some of it"
            ) from None
        except Exception as failure:  # a compiler of kernels may raise anything
            error, reason = math.inf, shorten(failure, 80)
            level = logging.INFO if isinstance(failure, ImportError) else logging.WARNING
        if error <= tolerance(dtype):
            found.append(backend)
        elif wanted != "auto":
            raise InputError(
                f"--attention {name} fails on {device} in {dtype} ({reason}); use --attention auto"
            )
        else:
            log.log(level, "attention %s is not used on %s: %s", name, device, reason)
    if not found:
        raise InputError(f"no attention backend works on {device} in {dtype}; use --device cpu")
    if found[0].name == "math" != wanted and dtype != torch.float32:
        slow = "attention falls back to plain formulas on %s, which read KV many times slower"
        log.warning(slow, device)
    return fastest(found, device, dtype, config) if len(found) > 1 else found[0]


def fastest(
    backends: Sequence[Backend], device: torch.device, dtype: torch.dtype, config: ModelConfig
) -> Backend:
    """The fastest backend for a token of this model behind a prefix of `TIMED_BYTES`."""
    K, D = config.num_kv_heads, config.head_dim
    S = round_up_to_stride(TIMED_BYTES // (2 * K * D * dtype.itemsize))
    q_BTHD = torch.zeros(1, 1, config.num_heads, D, dtype=dtype, device=device)
    keys_BKSD, values_BKSD = (torch.zeros(1, K, S, D, dtype=dtype, device=device) for _ in range(2))
    block = ShortBlock(q_BTHD, keys_BKSD, values_BKSD, torch.tensor([S - 1], device=device))
    times = [milliseconds(functools.partial(backend, block)) for backend in backends]
    for backend, ms in zip(backends, times, strict=True):
        log.info("attention %s takes %.3f ms for a token behind %d", backend.name, ms, S - 1)
    return backends[times.index(min(times))]


def milliseconds(work: Callable[[], object]) -> float:
    """What a CUDA device takes for it: the median of some runs."""
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def tolerance(dtype: torch.dtype) -> float:
    """The largest error of outputs around 1 that rounding explains."""
    return {torch.bfloat16: 0.02, torch.float16: 0.003}.get(dtype, 1e-4)


def largest_error(
    backend: Backend, device: torch.device, dtype: torch.dtype, config: ModelConfig, T: int
) -> float:
    """Distance from the oracle on a ragged random batch with long, short and empty prefixes, of
    chains and, where the backend takes them, of trees."""
    generator = torch.Generator().manual_seed(0)
    S, lengths = 2048, [1900, 0, 700]
    H, K, D = config.num_heads, config.num_kv_heads, config.head_dim
    q_BTHD = torch.randn(3, T, H, D, generator=generator).to(device, dtype)
    keys_BKSD, values_BKSD = (
        torch.randn(3, K, S, D, generator=generator).to(device, dtype) for _ in range(2)
    )
    lengths_B = torch.tensor(lengths, device=device)
    tree_TT = torch.eye(T, dtype=torch.bool) | (torch.rand(T, T, generator=generator) < 0.3).tril()
    errors = []
    for rule_TT in [None] if backend.only_causal else [None, tree_TT.to(device)]:
        got = backend(ShortBlock(q_BTHD, keys_BKSD, values_BKSD, lengths_B, rule_TT))
        wide = (q_BTHD.double(), keys_BKSD.double(), values_BKSD.double())
        error = (got.double() - attend_math(*wide, lengths, rule_TT)).abs().max()
        errors.append(float(error.nan_to_num(math.inf)))
    return max(errors)
