"""Allocates the full cache where it fits; `placement.py` says what fits."""

import contextlib
import logging
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minitri.caches.full import FullCache
from minitri.config import ModelConfig
from minitri.errors import InputError, explain
from minitri.gpu.offload.host_memory import HostMemory
from minitri.gpu.offload.offloaded_cache import OffloadedFullCache
from minitri.gpu.placement import GIB, Demand, choose_on_chip
from minitri.model.llama import Llama
from minitri.settings import GenerationConfig, SpeculationConfig

log = logging.getLogger("minitri")


def free_host_bytes() -> float:
    """Host memory that can be taken, by the system and by a container's limit, caches of files
    included; or as much as $MINITRI_HOST_GIB says. Raises `InputError` if that is no number."""
    if wanted := os.environ.get("MINITRI_HOST_GIB"):
        with explain(f"MINITRI_HOST_GIB is {wanted!r}", "give GiB, such as 64"):
            return GIB * float(wanted)
    free = [math.inf]
    with contextlib.suppress(OSError, IndexError, ValueError):
        _, available = Path("/proc/meminfo").read_text().split("MemAvailable:")
        free.append(1024.0 * int(available.split()[0]))
    with contextlib.suppress(OSError, KeyError, ValueError):  # "max" where there is no limit
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
        taken = dict(line.split() for line in lines)
        limit = float(Path("/sys/fs/cgroup/memory.max").read_text())
        free.append(limit - int(taken["anon"]) - int(taken["shmem"]))
    return min(free)


def demand_of(
    target: Llama,
    draft: ModelConfig | None,
    generation: GenerationConfig,
    speculation: SpeculationConfig,
    num_tokens: int,
    prompt_lengths: list[int],
) -> tuple[Demand, float, float]:
    """What a run needs here, and the bytes that each rank can take on its device, weights
    included, and of the host's memory."""
    whose = (target.config, draft, speculation, num_tokens, prompt_lengths)
    needs = Demand(*whose, generation.prefill_chunk, target.dtype.itemsize)
    ranks = target.execution.ranks
    on_host = ranks.least(free_host_bytes()) / ranks.count
    on_device = on_host
    if target.device.type == "cuda":
        # Blocks that are partly in use are kept by the allocator, and hold no large tensor.
        torch.cuda.empty_cache()
        on_device = ranks.least(float(torch.cuda.mem_get_info(target.device)[0]))
    parts = needs.parts(0)
    return needs, on_device + parts["weights"] + parts["weights that only propose"], on_host


def most_rows(
    target: Llama,
    draft: ModelConfig | None,
    generation: GenerationConfig,
    speculation: SpeculationConfig,
    longest: list[int],
    kept_host_bytes: int = 0,
) -> int:
    """How many texts memory holds at a time, of prompts in falling order of length; at least 1."""
    num_tokens = longest[0] + generation.max_new_tokens
    run = (target, draft, generation, speculation, num_tokens)
    whole, on_device, on_host = demand_of(*run, longest)
    room = (on_device, on_host + kept_host_bytes)
    on_chip = None if generation.offload else target.config.num_layers
    needs = ((n, replace(whole, prompt_lengths=longest[:n])) for n in range(len(longest), 1, -1))
    return next((n for n, demand in needs if demand.fits(*room, on_chip)), 1)


def allocate_full_cache(
    target: Llama,
    draft: ModelConfig | None,
    generation: GenerationConfig,
    speculation: SpeculationConfig,
    prompt_lengths: list[int],
    capacity: int,
    host: HostMemory | None = None,
) -> FullCache:
    """An empty full cache with `capacity` slots per prompt, on the device or partly in memory that
    `host` lends. Raises `InputError` if there is no room for it and what else a run needs."""
    config, device, B = target.config, target.device, len(prompt_lengths)
    where: dict[str, Any] = {"dtype": target.dtype, "device": device}
    on_chip = config.num_layers
    host = host or HostMemory(device)
    try:
        if device.type == "cuda":
            models = (target, draft, generation, speculation)
            needs, on_device, on_host = demand_of(*models, capacity, prompt_lengths)
            on_chip = choose_on_chip(needs, generation, on_device, on_host + host.num_free_bytes)
        elif generation.offload:
            raise InputError("offload=True is for GPUs, and this is none; leave it out")
        if on_chip == config.num_layers:
            return FullCache.allocate(config, B, capacity, **where)
        placed = "KV cache: %d of %d layers on %s, the others in host memory"
        log.debug(placed, on_chip, config.num_layers, device)
        return OffloadedFullCache(config, B, capacity, on_chip=on_chip, host=host, **where)
    except (RuntimeError, OSError):  # out of memory, on CUDA too
        needed = B * capacity * config.kv_values_per_token * target.dtype.itemsize
        raise InputError(
            f"the KV cache for {B} x {capacity} tokens needs {needed / 1e9:.1f} GB, which {device} "
            "does not have; shorten the prompt, lower max_new_tokens, or use a smaller dtype"
        ) from None
