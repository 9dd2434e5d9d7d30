"""What a run needs in bytes, what of it fits where, and how fast it can be: arithmetic, before anything is allocated.

An engine boots with these numbers and `python -m minitri.plan` prints them. The KV cache of the first `on_chip` layers
lives on the device, that of the others in host memory (`caches/offloaded.py`). Predictions are bytes over bandwidth: a
decoding step reads every weight and all KV once, from device memory or, if it takes longer, over the link to the host.

Legend: L layers, B batch, S slots, K KV heads, H query heads, D head dim, E hidden size, V vocab, T tokens of a chunk.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from minitri.gpu.offloaded_cache import RING
from minitri.caches.streaming import SLIDE
from minitri.model.cache import round_up_to_stride
from minitri.model.config import ModelConfig
from minitri.errors import InputError
from minitri.settings import Plan, SpeculationConfig
from minitri.decoding.autotuner import expected_block, expected_tokens

GIB = 1 << 30
RESERVE = GIB
"""Bytes of device memory left to the CUDA context, library workspaces, graphs and what the allocator wastes."""


def num_weights(config: ModelConfig) -> int:
    """Numbers in a model's weights; of a drafter without an embedding table, its own only."""
    E, heads = config.hidden_size, config.num_heads + 2 * config.num_kv_heads
    layer = (
        E * config.head_dim * (heads + config.num_heads) + 3 * E * config.intermediate_size + 2 * E
    )
    if config.attention_bias:
        layer += config.head_dim * heads + E
    head = config.vocab_size if config.head_size is None else config.head_size
    tables = 1 if config.tie_word_embeddings or config.draft_of is not None else 2
    return config.num_layers * layer + E + tables * head * E


def read_per_token(config: ModelConfig) -> int:
    """Numbers of the weights that decoding a token reads: of an untied embedding table it reads one row."""
    untied = not config.tie_word_embeddings and config.draft_of is None
    return num_weights(config) - (config.vocab_size * config.hidden_size if untied else 0)


@dataclass(frozen=True)
class Demand:
    """Bytes of a run."""

    weights: int
    draft_weights: int
    kv_layer: int
    """Full KV cache of one layer."""
    ring_layer: int
    """Latest tokens that stay on the device, of one layer in host memory."""
    small_caches: int
    """Retrieval cache with its chunk means, and the drafter's window."""
    activations: int
    """While a chunk of the prompt is read, or a block verified; an estimate."""
    num_layers: int

    def parts(self, on_chip: int) -> dict[str, int]:
        """Bytes on the device by what they are for."""
        hosted = self.num_layers - on_chip
        return {
            "weights": self.weights,
            "drafter's weights": self.draft_weights,
            "full KV cache": on_chip * self.kv_layer,
            "staging buffers": min(hosted, 2) * self.kv_layer + hosted * self.ring_layer,
            "small KV caches": self.small_caches,
            "activations": self.activations,
            "reserve, graphs": RESERVE,
        }

    def on_device(self, on_chip: int) -> int:
        """Bytes on the device if so many layers keep their KV there."""
        return sum(self.parts(on_chip).values())

    def on_host(self, on_chip: int) -> int:
        """Bytes of page-locked host memory."""
        return (self.num_layers - on_chip) * self.kv_layer

    def most_on_chip(self, device_bytes: float) -> int | None:
        """The most layers whose KV can stay on a device of so many bytes; None if it is too small for none of them."""
        fits = [
            on_chip
            for on_chip in range(self.num_layers + 1)
            if self.on_device(on_chip) <= device_bytes
        ]
        return max(fits, default=None)


def demand(
    config: ModelConfig,
    draft: ModelConfig | None,
    speculation: SpeculationConfig,
    *,
    num_tokens: int,
    prompt_lengths: list[int],
    prefill_chunk: int = 1024,
    itemsize: int = 2,
) -> Demand:
    """What sequences of up to `num_tokens` need, prompts of these lengths included; without a `draft` n-grams are the
    drafter."""
    B, L, K, D = len(prompt_lengths), config.num_layers, config.num_kv_heads, config.head_dim
    slots = round_up_to_stride(num_tokens + speculation.max_block)
    methods, chunk = {plan.method for plan in speculation.plans}, speculation.chunk_size
    small = 0
    if methods & {"retrieval", "triforce"}:
        budget = min(speculation.max_budget_for(prompt_lengths), -(-slots // chunk) * chunk)
        held = round_up_to_stride(budget + speculation.room)
        small += B * L * K * D * (2 * held + slots // chunk)
        small += (
            B * L * config.num_heads * D * (speculation.observation_window + speculation.max_block)
        )
    draft = draft if methods & {"naive", "triforce"} else None
    if draft is not None:
        window = (
            speculation.num_sink_tokens + speculation.num_recent_tokens + SLIDE + speculation.room
        )
        small += 3 * B * draft.num_layers * draft.num_kv_heads * draft.head_dim * window
    row = 8 * config.hidden_size + 3 * config.intermediate_size + 4 * (config.num_heads + 2 * K) * D
    laws = (
        40 * B * speculation.max_block * config.vocab_size
    )  # scores, sorted and with their places, running sums
    return Demand(
        weights=num_weights(config) * itemsize,
        draft_weights=num_weights(draft) * itemsize if draft is not None else 0,
        kv_layer=2 * B * K * slots * D * itemsize,
        ring_layer=2 * B * K * RING * D * itemsize,
        small_caches=small * itemsize,
        activations=max(prefill_chunk, B * speculation.max_block) * row * itemsize + laws,
        num_layers=L,
    )


def shortage(needs: Demand, device_bytes: float, host_bytes: float, name: str) -> str | None:
    """What is too small for every placement, and what to do about it; None if some placement fits."""
    best = needs.most_on_chip(device_bytes)
    if best is None:
        return (
            f"{name} needs {needs.on_device(0) / GIB:.2f} GiB on the device even with its whole KV cache in host "
            f"memory, got {device_bytes / GIB:.2f}; shorten the context, lower --prefill-chunk, or use a smaller model "
            "or dtype"
        )
    if needs.on_host(best) > host_bytes:
        return (
            f"the KV cache of {name} needs {needs.on_host(best) / GIB:.2f} GiB of host memory beside {best} layers on "
            f"the device, got {host_bytes / GIB:.2f}; shorten the context, or use a smaller batch or dtype"
        )
    return None


def choose_on_chip(
    needs: Demand,
    *,
    offload: bool,
    on_chip: int | None,
    device_bytes: float,
    host_bytes: float,
    name: str,
) -> int:
    """Layers whose KV stays on the device: all without `offload`, else `on_chip` or as many as fit.

    Raises `InputError` if that does not fit; `device_bytes` include what the weights have already taken.
    """
    L = needs.num_layers
    if not offload:
        if needs.on_device(L) - RESERVE > device_bytes:
            raise InputError(
                f"{name} needs {needs.on_device(L) / GIB:.1f} GiB on the device with its whole KV cache, "
                f"got {device_bytes / GIB:.1f}; use --offload, or shorten the prompt (see python -m minitri.plan)"
            )
        return L
    if on_chip is not None and on_chip > L:
        raise InputError(
            f"--on-chip is {on_chip} layers, but {name} has {L}; lower it, or leave it out"
        )
    if (missing := shortage(needs, device_bytes, host_bytes, name)) is not None:
        raise InputError(missing)
    best = needs.most_on_chip(device_bytes)
    assert best is not None
    wanted = best if on_chip is None else on_chip
    if wanted > best or needs.on_host(wanted) > host_bytes:
        raise InputError(
            f"--on-chip {wanted} needs {needs.on_device(wanted) / GIB:.1f} GiB on the device and "
            f"{needs.on_host(wanted) / GIB:.1f} in host memory, got {device_bytes / GIB:.1f} and "
            f"{host_bytes / GIB:.1f}; {best} layers fit, or shorten the prompt"
        )
    return wanted


def free_host_bytes() -> float:
    """Host memory that can be taken, by the system and by the limit of a container; unlimited where nothing says so."""
    free = [math.inf]
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(
            next(
                1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")
            )
        )
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        limits = Path("/sys/fs/cgroup")
        free.append(
            float(
                int((limits / "memory.max").read_text())
                - int((limits / "memory.current").read_text())
            )
        )
    return min(free)


def free_device_bytes(device: torch.device) -> float:
    """Memory of a CUDA device that this process can take, what PyTorch holds but does not use included."""
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


@dataclass(frozen=True)
class Machine:
    """What the bytes move through."""

    device_bytes_per_second: float
    link_bytes_per_second: float
    """From host memory to the device."""


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of each phase and per token."""

    plan: Plan
    """How the cascade goes about it."""
    draft: float
    retrieval: float
    target: float
    """A pass over the full cache: a token of autoregressive decoding, or the verification of a block."""
    cascade: float
    """Per token, all phases together."""

    @property
    def speedup(self) -> float:
        """Of the cascade over autoregressive decoding."""
        return self.target / self.cascade


def predict(
    config: ModelConfig,
    draft: ModelConfig | None,
    machine: Machine,
    *,
    on_chip: int,
    num_tokens: int,
    budget: int,
    plan: Plan,
    acceptance: tuple[float, float],
    batch_size: int = 1,
    itemsize: int = 2,
) -> Prediction:
    """Bytes over bandwidth behind `num_tokens`, with these acceptance rates of the drafter's and the small cache's
    guesses. Copies of layers in host memory run beside everything that computes, so the slower of the two counts."""
    read = itemsize * read_per_token(config)
    kv = batch_size * itemsize * config.kv_values_per_token
    from_memory = (read + kv * num_tokens) / machine.device_bytes_per_second
    hosted = (config.num_layers - on_chip) / config.num_layers
    target = max(from_memory, hosted * kv * num_tokens / machine.link_bytes_per_second)
    retrieval = (read + kv * budget) / machine.device_bytes_per_second
    draft_seconds = (
        itemsize * read_per_token(draft) / machine.device_bytes_per_second
        if draft is not None
        else 0.0
    )
    length, num_rounds = expected_block(acceptance[0], plan)
    guessing = num_rounds * (plan.gamma1 * draft_seconds + retrieval)
    cascade = (guessing + target) / expected_tokens(acceptance[1], length)
    return Prediction(plan, 1e3 * draft_seconds, 1e3 * retrieval, 1e3 * target, 1e3 * cascade)
