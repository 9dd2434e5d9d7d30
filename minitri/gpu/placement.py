"""How many bytes a run needs, and what of it fits where, before anything is allocated.

An engine boots with these numbers and `python -m minitri.plan` prints them. The KV cache of the
first `on_chip` layers lives on the device, that of the others in host memory.

Legend: L layers, B batch.
"""

from dataclasses import dataclass
from functools import cached_property

from minitri.config import ModelConfig
from minitri.errors import InputError
from minitri.roofline import copy_bytes, num_weights
from minitri.settings import (
    LONGEST_BLOCK,
    SLIDE,
    GenerationConfig,
    SpeculationConfig,
    round_up_to_stride,
)

GIB = 1 << 30
CONTEXT = int(0.8 * GIB)
"""What a card's nominal size loses to driver and CUDA context: 24 GB cards have 23.2 GiB free."""
RESERVE = GIB // 2
"""Free device memory left to workspaces of libraries, graphs and allocator waste."""


@dataclass(frozen=True)
class Demand:
    """What a run computes, and the bytes that it needs, on each of its GPUs."""

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
    copy_bits: int = 0
    """Of a copy of the weights that proposes with the retrieval cache; 0: there is none."""

    @cached_property
    def share(self) -> ModelConfig:
        """The model's part on a GPU. Raises `InputError` if it cannot be split over that many."""
        return self.config.share(self.num_gpus)

    @property
    def slots(self) -> int:
        """Of each row of the full cache."""
        return round_up_to_stride(self.num_tokens + self.speculation.max_block)

    @property
    def kv_slot(self) -> int:
        """Bytes of a token of every row in one layer of the full cache."""
        config = self.share
        return len(self.prompt_lengths) * 2 * config.num_kv_heads * config.head_dim * self.itemsize

    def parts(self, on_chip: int) -> dict[str, int]:
        """Bytes on the device by what they are for."""
        config = self.share
        hosted = config.num_layers - on_chip
        kv_layer = self.slots * self.kv_slot
        # Of a prompt that is read layer by layer.
        hidden_states = max(self.prompt_lengths) * config.hidden_size * self.itemsize
        return {
            "weights": num_weights(config) * self.itemsize,
            "weights that only propose": self._draft_weights(),
            "full KV cache": on_chip * kv_layer,
            "staging buffers": min(hosted, 2) * kv_layer + hosted * LONGEST_BLOCK * self.kv_slot,
            "small KV caches": self._small_caches(),
            "activations": self._activations() + (hidden_states if hosted else 0),
            "reserve, graphs": RESERVE,
        }

    def _draft_weights(self) -> int:
        num_bytes = copy_bytes(self.share, self.copy_bits)
        if self.draft is not None and any(plan.uses_drafter for plan in self.speculation.plans):
            num_bytes += num_weights(self.draft) * self.itemsize
        return num_bytes

    def _small_caches(self) -> int:
        """Of the retrieval cache, its queries, and of the drafter's window."""
        config = self.share
        speculation = self.speculation
        B = len(self.prompt_lengths)
        num_bytes = 0
        if any(plan.uses_retrieval for plan in speculation.plans):
            chunk = speculation.chunk_size
            longest = max(speculation.budget_for(length) for length in self.prompt_lengths)
            budget = min(longest, -(-self.slots // chunk) * chunk)
            held = config.num_layers * round_up_to_stride(budget + speculation.room)
            num_bytes += held * self.kv_slot
            num_queries = speculation.observation_window + speculation.max_block
            width = config.num_heads * config.head_dim
            num_bytes += B * config.num_layers * num_queries * width * self.itemsize
        draft = self.draft
        if draft is not None and any(plan.uses_drafter for plan in speculation.plans):
            window = speculation.num_sink_tokens + speculation.num_recent_tokens + SLIDE
            width = draft.num_layers * draft.num_kv_heads * draft.head_dim
            num_bytes += 3 * B * width * (window + speculation.room) * self.itemsize
        return num_bytes

    def _activations(self) -> int:
        """While a chunk of the prompt is read, or a block verified; an estimate."""
        config = self.share
        num_tokens = len(self.prompt_lengths) * self.speculation.max_block
        heads = config.num_heads + 2 * config.num_kv_heads
        row = 8 * config.hidden_size + 3 * config.intermediate_size + 4 * heads * config.head_dim
        sampling = 40 * num_tokens * config.vocab_size  # logits, sorted, with running sums
        return max(self.prefill_chunk, num_tokens) * row * self.itemsize + sampling

    def on_device(self, on_chip: int) -> int:
        """Bytes on the device if `on_chip` layers keep their KV there."""
        return sum(self.parts(on_chip).values())

    def on_host(self, on_chip: int) -> int:
        """Bytes of page-locked host memory."""
        return (self.config.num_layers - on_chip) * self.slots * self.kv_slot

    def most_on_chip(self, device_bytes: float) -> int | None:
        """The most layers whose KV fits on a device of that size; None: not even none of them."""
        choices = range(self.config.num_layers + 1)
        return max((n for n in choices if self.on_device(n) <= device_bytes), default=None)

    def fits(self, device_bytes: float, host_bytes: float, on_chip: int | None = None) -> bool:
        """Whether there is room with KV of `on_chip` layers on the device; None: of the most."""
        best = self.most_on_chip(device_bytes)
        if best is None:
            return False
        wanted = best if on_chip is None else on_chip
        return wanted <= best and self.on_host(wanted) <= host_bytes


def choose_on_chip(
    needs: Demand, generation: GenerationConfig, device_bytes: float, host_bytes: float
) -> int:
    """Layers whose KV stays on the device: all without `offload`, else `on_chip` or the most that
    fit. `device_bytes` include what weights have already taken. Raises `InputError` with what is
    needed, and what to do, where that does not fit."""
    L, room = needs.config.num_layers, device_bytes
    on_chip = generation.on_chip
    if not generation.offload:
        on_chip, room = L, device_bytes + RESERVE
    here = needs.most_on_chip(room) or 0 if on_chip is None else on_chip
    if needs.fits(room, host_bytes, on_chip):
        return here
    raise InputError(
        f"{needs.config.name} needs {needs.on_device(here) / GIB:.2f} GiB on the device and "
        f"{needs.on_host(here) / GIB:.2f} in host memory with the KV cache of {here} of {L} layers "
        f"on the device, got {device_bytes / GIB:.2f} and {host_bytes / GIB:.2f}",
        "shorten the text",
        "use offload=True",
        "lower prefill_chunk=",
        "take a smaller model",
        "use more GPUs (torchrun)",
    )
