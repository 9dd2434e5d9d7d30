"""How many bytes a run needs, and what of it fits where, before anything is allocated.

An engine boots with these numbers and `python -m minitri.plan` prints them. The KV cache of the
first `on_chip` layers lives on the device, that of the others in host memory, see
`offload/offloaded_cache.py`.

Legend: L layers, B batch, S slots, K KV heads, H query heads, D head dim, V vocab.
"""

import contextlib
import itertools
import logging
import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minitri.caches.full import FullCache
from minitri.caches.streaming import SLIDE
from minitri.config import ModelConfig
from minitri.errors import InputError
from minitri.execution import Ranks
from minitri.gpu.offload.host_memory import HostMemory
from minitri.gpu.offload.offloaded_cache import RING, OffloadedFullCache
from minitri.model.cache import round_up_to_stride
from minitri.model.llama import Llama
from minitri.parallel.split import SPLIT, share_of
from minitri.roofline import eight_bit_bytes, num_weights
from minitri.settings import GenerationConfig, SpeculationConfig

log = logging.getLogger("minitri")

GIB = 1 << 30
MAX_BUFFERS = 4
"""Staging buffers, at most: while others guess a link moves two layers, or three of a small one."""
CONTEXT = int(0.8 * GIB)
"""What a card's nominal size loses to the driver and the CUDA context before a model is loaded: 24
GB cards have 23.2 GiB free."""
RESERVE = GIB // 2
"""Free device memory left to workspaces of libraries, graphs and allocator waste."""


@dataclass(frozen=True)
class Demand:
    """Bytes that a run needs."""

    weights: int
    draft_weights: int
    kv_layer: int
    """Full KV cache of one layer."""
    ring_layer: int
    """Latest tokens that stay on the device, of one layer in host memory."""
    small_caches: int
    """Retrieval cache and the drafter's window."""
    means_layer: int
    """Chunk means of one layer; those of all layers are kept where all K and V are here."""
    activations: int
    """While a chunk of the prompt is read, or a block verified; an estimate."""
    hidden_states: int
    """Of a prompt that is read layer by layer."""
    num_layers: int
    given: dict[str, Any]
    """What `demand` was given."""

    def parts(self, on_chip: int) -> dict[str, int]:
        """Bytes on the device by what they are for."""
        hosted = self.num_layers - on_chip
        num_means, hidden_states = (1, self.hidden_states) if hosted else (on_chip, 0)
        return {
            "weights": self.weights,
            "weights that only guess": self.draft_weights,
            "full KV cache": on_chip * self.kv_layer,
            "staging buffers": min(hosted, 2) * self.kv_layer + hosted * self.ring_layer,
            "small KV caches": self.small_caches + num_means * self.means_layer,
            "activations": self.activations + hidden_states,
            "reserve, graphs": RESERVE,
        }

    def on_device(self, on_chip: int) -> int:
        """Bytes on the device if so many layers keep their KV there."""
        return sum(self.parts(on_chip).values())

    def on_host(self, on_chip: int) -> int:
        """Bytes of page-locked host memory."""
        return (self.num_layers - on_chip) * self.kv_layer

    def most_on_chip(self, device_bytes: float) -> int | None:
        """The most layers whose KV fits on a device of that size; None: not even none of them."""
        choices = range(self.num_layers + 1)
        return max((n for n in choices if self.on_device(n) <= device_bytes), default=None)

    def num_buffers(self, on_chip: int, device_bytes: float) -> int:
        """Staging buffers that fit beside so many layers; none would be worth a layer less."""
        spare = (device_bytes - self.on_device(on_chip)) // self.kv_layer
        return int(min(max(2, 2 + spare), MAX_BUFFERS))


def demand(
    config: ModelConfig, draft: ModelConfig | None, speculation: SpeculationConfig, *,
    num_tokens: int, prompt_lengths: list[int], prefill_chunk: int = 1024, itemsize: int = 2,
    num_gpus: int = 1, has_copy: bool = False,
) -> Demand:  # fmt: skip
    """Bytes for sequences of up to `num_tokens`, prompts of these lengths included; a `draft` of
    None stands for lookup. Of several GPUs that share the model, on each; with `has_copy` the
    retrieval level guesses with a copy of the weights in 8 bits."""
    given = locals()
    ranks, vocab_size = Ranks(), config.vocab_size
    ranks.count = num_gpus
    config = share_of(config, ranks)
    B, L, K, D = len(prompt_lengths), config.num_layers, config.num_kv_heads, config.head_dim
    H, block, chunk = config.num_heads, speculation.max_block, speculation.chunk_size
    slots, small, means = round_up_to_stride(num_tokens + block), 0, 0
    if any(plan.uses_retrieval for plan in speculation.plans):
        longest = max(speculation.budget_for(length) for length in prompt_lengths)
        budget = min(longest, -(-slots // chunk) * chunk)
        held = round_up_to_stride(budget + speculation.room)
        small += B * L * K * D * 2 * held
        means = B * K * D * (slots // chunk)
        small += B * L * H * D * (speculation.observation_window + block)
    draft_weights = eight_bit_bytes(config) if has_copy else 0
    if draft is not None and any(plan.uses_drafter for plan in speculation.plans):
        draft_weights += num_weights(draft) * itemsize
        window = speculation.num_sink_tokens + speculation.num_recent_tokens + SLIDE
        window += speculation.room
        small += 3 * B * draft.num_layers * draft.num_kv_heads * draft.head_dim * window
    row = 8 * config.hidden_size + 3 * config.intermediate_size + 4 * (H + 2 * K) * D
    sampling = 40 * B * block * vocab_size  # logits, sorted, with places and running sums
    return Demand(
        weights=num_weights(config) * itemsize,
        draft_weights=draft_weights,
        kv_layer=2 * B * K * slots * D * itemsize,
        ring_layer=2 * B * K * RING * D * itemsize,
        small_caches=small * itemsize,
        means_layer=means * itemsize,
        hidden_states=max(prompt_lengths) * config.hidden_size * itemsize,
        activations=max(prefill_chunk, B * block) * row * itemsize + sampling,
        num_layers=L,
        given=given,
    )


def what_fits(needs: Demand, device_bytes: float, host_bytes: float) -> str:
    """What of the same run would fit: a shorter context, smaller chunks or numbers, more GPUs."""
    given, tokens, chunk = needs.given, needs.given["num_tokens"], needs.given["prefill_chunk"]
    more, smaller = 2 * given["num_gpus"], [1 << bits for bits in range(16, 5, -1)]

    def fits(host_bytes: float = host_bytes, **changes: Any) -> bool:
        other = demand(**given | changes)
        best = other.most_on_chip(device_bytes)
        return best is not None and other.on_host(best) <= host_bytes

    def is_too_long(thousands: int) -> bool:
        lengths = [min(length, 1024 * thousands) for length in given["prompt_lengths"]]
        return not fits(num_tokens=1024 * thousands, prompt_lengths=lengths)

    most = 1024 * (bisect_left(range(tokens // 1024 + 1), True, lo=1, key=is_too_long) - 1)
    found = [f"a context of {most} tokens"] if 0 < most < tokens else []
    chunks = (size for size in smaller if size < chunk and fits(prefill_chunk=size))
    found += [f"--prefill-chunk {size}" for size in itertools.islice(chunks, 1)]
    found += ["--dtype bfloat16"] if given["itemsize"] > 2 and fits(itemsize=2) else []
    if all(getattr(given["config"], name) % more == 0 for name in SPLIT):
        is_enough = fits(host_bytes * given["num_gpus"] / more, num_gpus=more)
        found += ["twice as many such GPUs (torchrun)"] if is_enough else []
    return " or ".join(found) + " would fit" if found else "use a smaller model or dtype"


def shortage(needs: Demand, device_bytes: float, host_bytes: float, name: str) -> str | None:
    """What is too small for every placement, and what to do; None if some placement fits."""
    best = needs.most_on_chip(device_bytes)
    if best is None:
        return (
            f"{name} needs {needs.on_device(0) / GIB:.2f} GiB on the device even with its whole KV "
            f"cache in host memory, got {device_bytes / GIB:.2f}; "
            + what_fits(needs, device_bytes, host_bytes)
        )
    if needs.on_host(best) > host_bytes:
        return (
            f"the KV cache of {name} needs {needs.on_host(best) / GIB:.2f} GiB of host memory "
            f"beside {best} layers on the device, got {host_bytes / GIB:.2f}; "
            + what_fits(needs, device_bytes, host_bytes)
        )
    return None


def choose_on_chip(
    needs: Demand, generation: GenerationConfig, device_bytes: float, host_bytes: float, name: str
) -> int:
    """Layers whose KV stays on the device: all without `offload`, else `on_chip` or the most that
    fit. `device_bytes` include what weights have already taken. Raises `InputError`."""
    L, gib, wanted = needs.num_layers, device_bytes / GIB, generation.on_chip
    if not generation.offload:
        if needs.on_device(L) - RESERVE > device_bytes:
            raise InputError(
                f"{name} needs {needs.on_device(L) / GIB:.1f} GiB on the device with its whole KV "
                f"cache, got {gib:.1f}; use --offload, or shorten the prompt (see python -m "
                "minitri.plan)"
            )
        return L
    if wanted is not None and wanted > L:
        raise InputError(
            f"--on-chip is {wanted} layers, but {name} has {L}; lower it, or leave it out"
        )
    if (missing := shortage(needs, device_bytes, host_bytes, name)) is not None:
        raise InputError(missing)
    best = needs.most_on_chip(device_bytes)
    assert best is not None
    wanted = best if wanted is None else wanted
    if wanted > best or needs.on_host(wanted) > host_bytes:
        raise InputError(
            f"--on-chip {wanted} needs {needs.on_device(wanted) / GIB:.1f} GiB on the device and "
            f"{needs.on_host(wanted) / GIB:.1f} in host memory, got {gib:.1f} and "
            f"{host_bytes / GIB:.1f}; {best} layers fit, or shorten the prompt"
        )
    return wanted


def free_bytes(device: torch.device, ranks: Ranks) -> tuple[float, float]:
    """Memory that each rank can take: of its device, a share of that of the host."""
    host = ranks.least(free_host_bytes()) / ranks.count
    on_device = free_device_bytes(device) if device.type == "cuda" else host
    return ranks.least(on_device), host


def free_host_bytes() -> float:
    """Host memory that can be taken, by the system and by a container's limit; else infinity."""
    free = [math.inf]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        free.append(1024.0 * int(available.split()[1]))
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        group = Path("/sys/fs/cgroup")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        free.append(float(limit - used))
    return min(free)


def free_device_bytes(device: torch.device) -> float:
    """Memory of a CUDA device that this process can take, or holds and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def most_rows(
    target: Llama, draft: ModelConfig | None, generation: GenerationConfig,
    speculation: SpeculationConfig, longest: list[int], kept_host_bytes: int = 0,
) -> int:  # fmt: skip
    """How many texts memory holds at a time, of prompts in falling order of length; at least 1."""
    L, (on_device, host) = (
        target.config.num_layers,
        free_bytes(target.device, target.execution.ranks),
    )
    host += kept_host_bytes
    for num_rows in range(len(longest), 1, -1):
        needs = demand(
            target.config, draft, speculation, num_tokens=longest[0] + generation.max_new_tokens,
            prompt_lengths=longest[:num_rows], prefill_chunk=generation.prefill_chunk,
            itemsize=target.dtype.itemsize,
        )  # fmt: skip
        device = needs.weights + needs.draft_weights + on_device
        if generation.offload:
            fits = shortage(needs, device, host, target.config.name) is None
        else:
            fits = needs.on_device(L) <= device
        if fits:
            return num_rows
    return 1


def allocate_full_cache(
    target: Llama, draft: ModelConfig | None, generation: GenerationConfig,
    speculation: SpeculationConfig, prompt_lengths: list[int], capacity: int,
    host: HostMemory | None = None,
) -> FullCache:  # fmt: skip
    """An empty full cache with `capacity` slots per prompt, on the device or partly on the host.

    `host` lends memory there. Raises `InputError` if there is no room for it and what else a run
    needs.
    """
    config, device, B = target.config, target.device, len(prompt_lengths)
    options: dict[str, Any] = {"dtype": target.dtype, "device": device}
    on_chip, host = config.num_layers, host or HostMemory(device)
    check_offload(target, generation)
    try:
        if device.type == "cuda":
            needs = demand(
                config, draft, speculation, num_tokens=capacity, prompt_lengths=prompt_lengths,
                prefill_chunk=generation.prefill_chunk, itemsize=target.dtype.itemsize,
            )  # fmt: skip
            on_device, on_host = free_bytes(device, target.execution.ranks)
            there = on_device + needs.weights + needs.draft_weights
            on_host += host.num_free_bytes
            on_chip = choose_on_chip(needs, generation, there, on_host, config.name)
            options |= {"num_buffers": needs.num_buffers(on_chip, there), "host": host}
        if on_chip == config.num_layers:
            return FullCache.allocate(config, B, capacity, dtype=target.dtype, device=device)
        placed = "KV cache: %d of %d layers on %s, the others in host memory"
        log.info(placed, on_chip, config.num_layers, device)
        return OffloadedFullCache.placed(config, B, capacity, on_chip=on_chip, **options)
    except RuntimeError:  # out of memory, on CUDA too
        needed = B * capacity * config.kv_values_per_token * target.dtype.itemsize
        raise InputError(
            f"the KV cache for {B} x {capacity} tokens needs {needed / 1e9:.1f} GB, which {device} "
            "does not have; shorten the prompt, lower max_new_tokens, or use a smaller dtype"
        ) from None


def check_offload(target: Llama, generation: GenerationConfig) -> None:
    """Raises `InputError` if KV is wanted in host memory for a model that runs there."""
    if generation.offload and target.device.type != "cuda":
        raise InputError(
            f"offload is for GPUs: {target.config.name} runs on the {target.device.type}, whose KV "
            "cache is in host memory already; leave --offload out"
        )
