"""How many bytes a run needs, and what of it fits where, before anything is allocated.

An engine boots with these numbers and `python -m minitri.plan` prints them. The KV cache of the
first `on_chip` layers lives on the device, that of the others in host memory, see
`offload/offloaded_cache.py`.

Legend: L layers, B batch.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

from minitri.caches.streaming import SLIDE
from minitri.config import SPLIT, ModelConfig
from minitri.errors import InputError
from minitri.gpu.offload.offloaded_cache import RING
from minitri.model.cache import round_up_to_stride
from minitri.roofline import eight_bit_bytes, num_weights
from minitri.settings import GenerationConfig, SpeculationConfig

GIB = 1 << 30
MAX_BUFFERS = 4
"""Staging buffers, at most: while others propose, a link moves two or three layers."""
CONTEXT = int(0.8 * GIB)
"""What a card's nominal size loses to driver and CUDA context: 24 GB cards have 23.2 GiB free."""
RESERVE = GIB // 2
"""Free device memory left to workspaces of libraries, graphs and allocator waste."""


@dataclass(frozen=True)
class Load:
    """What a run computes."""

    config: ModelConfig
    draft: ModelConfig | None
    """None stands for lookup."""
    speculation: SpeculationConfig
    num_tokens: int
    """Of the longest sequence, its prompt included."""
    prompt_lengths: list[int]
    prefill_chunk: int = 1024
    itemsize: int = 2
    num_gpus: int = 1
    """That share the model."""
    has_copy: bool = False
    """Whether a copy of the weights in 8 bits proposes with the retrieval cache."""


@dataclass(frozen=True)
class Demand:
    """Bytes that a run needs, on each of its GPUs."""

    load: Load
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

    def parts(self, on_chip: int) -> dict[str, int]:
        """Bytes on the device by what they are for."""
        hosted = self.load.config.num_layers - on_chip
        num_means = 1 if hosted else on_chip
        return {
            "weights": self.weights,
            "weights that only propose": self.draft_weights,
            "full KV cache": on_chip * self.kv_layer,
            "staging buffers": min(hosted, 2) * self.kv_layer + hosted * self.ring_layer,
            "small KV caches": self.small_caches + num_means * self.means_layer,
            "activations": self.activations + (self.hidden_states if hosted else 0),
            "reserve, graphs": RESERVE,
        }

    def on_device(self, on_chip: int) -> int:
        """Bytes on the device if `on_chip` layers keep their KV there."""
        return sum(self.parts(on_chip).values())

    def on_host(self, on_chip: int) -> int:
        """Bytes of page-locked host memory."""
        return (self.load.config.num_layers - on_chip) * self.kv_layer

    def most_on_chip(self, device_bytes: float) -> int | None:
        """The most layers whose KV fits on a device of that size; None: not even none of them."""
        choices = range(self.load.config.num_layers + 1)
        return max((n for n in choices if self.on_device(n) <= device_bytes), default=None)

    def num_buffers(self, on_chip: int, device_bytes: float) -> int:
        """Staging buffers that fit next to these layers; none would be worth a layer less."""
        spare = (device_bytes - self.on_device(on_chip)) // self.kv_layer
        return int(min(max(2, 2 + spare), MAX_BUFFERS))


def demand(load: Load) -> Demand:
    """Bytes that a run needs. Raises `InputError` if the model cannot be split over its GPUs."""
    config = load.config.share(load.num_gpus)
    speculation = load.speculation
    B = len(load.prompt_lengths)
    L = config.num_layers
    D = config.head_dim
    H, K = config.num_heads, config.num_kv_heads
    block = speculation.max_block
    chunk = speculation.chunk_size
    slots = round_up_to_stride(load.num_tokens + block)
    small = means = 0  # numbers
    if any(plan.uses_retrieval for plan in speculation.plans):
        longest = max(speculation.budget_for(length) for length in load.prompt_lengths)
        budget = min(longest, -(-slots // chunk) * chunk)
        small += 2 * B * L * K * D * round_up_to_stride(budget + speculation.room)
        small += B * L * H * D * (speculation.observation_window + block)
        means = B * K * D * (slots // chunk)
    draft_weights = eight_bit_bytes(config) if load.has_copy else 0
    draft = load.draft
    if draft is not None and any(plan.uses_drafter for plan in speculation.plans):
        draft_weights += num_weights(draft) * load.itemsize
        window = speculation.num_sink_tokens + speculation.num_recent_tokens + SLIDE
        window += speculation.room
        small += 3 * B * draft.num_layers * draft.num_kv_heads * draft.head_dim * window
    row = 8 * config.hidden_size + 3 * config.intermediate_size + 4 * (H + 2 * K) * D
    sampling = 40 * B * block * config.vocab_size  # logits, sorted, with running sums
    return Demand(
        load,
        weights=num_weights(config) * load.itemsize,
        draft_weights=draft_weights,
        kv_layer=2 * B * K * slots * D * load.itemsize,
        ring_layer=2 * B * K * RING * D * load.itemsize,
        small_caches=small * load.itemsize,
        means_layer=means * load.itemsize,
        activations=max(load.prefill_chunk, B * block) * row * load.itemsize + sampling,
        hidden_states=max(load.prompt_lengths) * config.hidden_size * load.itemsize,
    )


def what_fits(needs: Demand, device_bytes: float, host_bytes: float) -> str:
    """What of the same run would fit: a shorter context, smaller chunks or numbers, more GPUs."""
    load = needs.load

    def fits(host_bytes: float = host_bytes, **changes: Any) -> bool:
        other = demand(replace(load, **changes))
        best = other.most_on_chip(device_bytes)
        return best is not None and other.on_host(best) <= host_bytes

    def is_too_long(thousands: int) -> bool:
        lengths = [min(length, 1024 * thousands) for length in load.prompt_lengths]
        return not fits(num_tokens=1024 * thousands, prompt_lengths=lengths)

    counts = range(load.num_tokens // 1024 + 1)
    most = 1024 * (bisect_left(counts, True, lo=1, key=is_too_long) - 1)
    found = [f"a context of {most} tokens"] if 0 < most < load.num_tokens else []
    chunks = [1 << bits for bits in range(16, 5, -1) if 1 << bits < load.prefill_chunk]
    chunk = next((size for size in chunks if fits(prefill_chunk=size)), None)
    found += [f"--prefill-chunk {chunk}"] if chunk is not None else []
    found += ["--dtype bfloat16"] if load.itemsize > 2 and fits(itemsize=2) else []
    more = 2 * load.num_gpus
    if all(getattr(load.config, name) % more == 0 for name in SPLIT):
        is_enough = fits(host_bytes / 2, num_gpus=more)
        found += ["twice as many such GPUs (torchrun)"] if is_enough else []
    return " or ".join(found) + " would fit" if found else "use a smaller model or dtype"


def shortage(needs: Demand, device_bytes: float, host_bytes: float) -> str | None:
    """What is too small for every placement, and what to do; None if some placement fits."""
    name = needs.load.config.name
    best = needs.most_on_chip(device_bytes)
    if best is None:
        missing = (
            f"{name} needs {needs.on_device(0) / GIB:.2f} GiB on the device even with its whole KV "
            f"cache in host memory, got {device_bytes / GIB:.2f}"
        )
    elif needs.on_host(best) > host_bytes:
        missing = (
            f"the KV cache of {name} needs {needs.on_host(best) / GIB:.2f} GiB of host memory next "
            f"to {best} layers on the device, got {host_bytes / GIB:.2f}"
        )
    else:
        return None
    return f"{missing}; {what_fits(needs, device_bytes, host_bytes)}"


def choose_on_chip(
    needs: Demand, generation: GenerationConfig, device_bytes: float, host_bytes: float
) -> int:
    """Layers whose KV stays on the device: all without `offload`, else `on_chip` or the most that
    fit. `device_bytes` include what weights have already taken. Raises `InputError`."""
    name = needs.load.config.name
    L = needs.load.config.num_layers
    gib = device_bytes / GIB
    if not generation.offload:
        if needs.on_device(L) - RESERVE > device_bytes:
            raise InputError(
                f"{name} needs {needs.on_device(L) / GIB:.1f} GiB on the device with its whole KV "
                f"cache, got {gib:.1f}; use --offload, or shorten the prompt (see python -m "
                "minitri.plan)"
            )
        return L
    if (missing := shortage(needs, device_bytes, host_bytes)) is not None:
        raise InputError(missing)
    best = needs.most_on_chip(device_bytes)
    assert best is not None
    wanted = best if generation.on_chip is None else generation.on_chip
    if wanted > best or needs.on_host(wanted) > host_bytes:
        raise InputError(
            f"--on-chip {wanted} needs {needs.on_device(wanted) / GIB:.1f} GiB on the device and "
            f"{needs.on_host(wanted) / GIB:.1f} in host memory, got {gib:.1f} and "
            f"{host_bytes / GIB:.1f}; {best} of {L} layers fit, or shorten the prompt"
        )
    return wanted
