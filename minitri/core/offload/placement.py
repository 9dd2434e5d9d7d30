"""Placement: the bytes that a run needs, and how many layers keep their KV cache on the device.
Computed before anything is allocated; `python -m minitri plan` prints the numbers. The KV cache of
the first `on_chip` of L layers is on the device, that of the others in host memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from minitri.core.config import ModelConfig
from minitri.core.errors import InputError
from minitri.core.roofline import copy_bytes, num_weights
from minitri.core.settings import LONGEST_BLOCK, pad_to_stride
from minitri.core.shape import MemoryShape

GIB = 1 << 30
CONTEXT = int(0.8 * GIB)  # taken by driver and CUDA context: 24 GB cards have 23.2 GiB free
RESERVE = GIB // 2  # left free for workspaces of libraries and fragmentation
SAMPLING = 40  # bytes per logit of a pass of decoding: the logit, sorted, with running sums
CAPTURED = 72  # the same of captured ones, with noise, and buffers of inputs and outputs


@dataclass(frozen=True)
class Demand:
    """Bytes that a run needs on each of its GPUs."""

    config: ModelConfig  # of the model, or of each GPU's share of it
    draft: ModelConfig | None  # of the draft model, if there is one
    shape: MemoryShape  # lengths of the rows, and settings
    itemsize: int = 2  # bytes of a number, in weights and in KV caches
    weight_bytes: int = 0  # of the model's weights; 0: `itemsize` for each
    copy_bits: int = 0  # bits per weight of the copy that guesses with the retrieval cache, if any
    captures: bool = True  # whether passes of decoding are captured as CUDA graphs

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest prompt, or those of `GenerationConfig.reserve` if they are more."""
        return max(*self.shape.prompt_lengths, self.shape.generation.reserve)

    @property
    def kv_slot(self) -> int:
        """Bytes of one slot, in all rows together, of one layer of the full cache."""
        config = self.config
        return self.shape.num_rows * 2 * config.num_kv_heads * config.head_dim * self.itemsize

    @property
    def kv_layer(self) -> int:
        return self.shape.capacity * self.kv_slot

    @property
    def drafter(self) -> ModelConfig | None:
        """Config of the draft model if a decoding step may use it, else None."""
        return self.draft if "draft" in self.shape.stages else None

    @property
    def placements(self) -> Sequence[int]:
        """Allowed numbers of layers with their KV cache on the device, best first."""
        num_layers = self.config.num_layers
        generation = self.shape.generation
        if not generation.offload:
            return [num_layers]
        return range(num_layers, -1, -1) if generation.on_chip is None else [generation.on_chip]

    @property
    def num_weight_bytes(self) -> int:
        return self.parts(0)["weights"] + self.parts(0)["weights that only propose"]

    def parts(self, on_chip: int) -> dict[str, int]:
        """Bytes on the device by their use, with the KV cache of `on_chip` layers there."""
        config = self.config
        hosted = config.num_layers - on_chip
        proposing = copy_bytes(config, self.copy_bits)
        if self.drafter:
            proposing += num_weights(self.drafter) * self.itemsize
        # Prefill layer by layer keeps the hidden states of the whole prompt.
        hidden = bool(hosted) * self.num_tokens * config.hidden_size * self.itemsize
        shape = self.shape
        block = shape.speculation.max_block
        # Passes of a target whose K and V are in host memory are not captured.
        captured = shape.speculation.small_block if hosted else block
        return {
            "weights": self.weight_bytes or num_weights(config) * self.itemsize,
            "weights that only propose": proposing,
            "full KV cache": on_chip * self.kv_layer,
            "staging buffers": min(hosted, 2) * self.kv_layer
            + hosted * LONGEST_BLOCK * self.kv_slot,
            "small KV caches": self._small_caches(),
            "activations": hidden
            + self._activations(block, SAMPLING, shape.generation.prefill_chunk),
            "captured passes": self.captures * self._activations(captured, CAPTURED),
            "reserve": RESERVE,
        }

    def _small_caches(self) -> int:
        config = self.config
        shape = self.shape
        speculation = shape.speculation
        num_bytes = 0
        if "retrieval" in shape.stages:
            window = min(config.window, shape.capacity)
            slots = pad_to_stride(max(*shape.budgets, window) + speculation.room)
            num_bytes += config.num_layers * slots * self.kv_slot
            num_queries = speculation.observation_window + speculation.max_block
            num_numbers = config.num_layers * num_queries * config.num_heads * config.head_dim
            num_bytes += shape.num_rows * num_numbers * self.itemsize
        if drafter := self.drafter:
            window = speculation.window_slots + speculation.max_block
            width = drafter.num_layers * drafter.num_kv_heads * drafter.head_dim
            num_bytes += 3 * shape.num_rows * width * window * self.itemsize
        return num_bytes

    def _activations(self, block: int, bytes_per_logit: int, num_read: int = 0) -> int:
        """Estimated bytes of a pass over `block` tokens per row, or `num_read` in all if more."""
        config = self.config
        num_tokens = self.shape.num_rows * block
        heads = config.num_heads + 2 * config.num_kv_heads
        row = 8 * config.hidden_size + 3 * config.intermediate_size + 4 * heads * config.head_dim
        sampling = bytes_per_logit * num_tokens * config.vocab_size
        return max(num_read, num_tokens) * row * self.itemsize + sampling

    def on_device(self, on_chip: int) -> int:
        """Bytes on the device in all, with the KV cache of `on_chip` layers there."""
        return sum(self.parts(on_chip).values())

    def on_host(self, on_chip: int) -> int:
        """Bytes of page-locked host memory, for the KV cache of all but `on_chip` layers."""
        return (self.config.num_layers - on_chip) * self.kv_layer

    def fits(self, device_bytes: float, host_bytes: float, on_chip: int) -> bool:
        """Whether the run fits into these bytes with the KV cache of `on_chip` layers on device."""
        is_possible = on_chip <= self.config.num_layers and self.on_host(on_chip) <= host_bytes
        return is_possible and self.on_device(on_chip) <= device_bytes

    def has_room(self, device_bytes: float, host_bytes: float) -> bool:
        """Whether the run fits with any allowed split of the KV cache between device and host."""
        return any(self.fits(device_bytes, host_bytes, n) for n in self.placements)


def choose_on_chip(needs: Demand, device_bytes: float, host_bytes: float) -> int:
    """Largest allowed number of layers whose KV cache fits on the device. Raises `InputError`."""
    choices = needs.placements
    room = device_bytes if needs.shape.generation.offload else device_bytes + RESERVE
    here = next((n for n in choices if needs.on_device(n) <= room), choices[-1])
    if needs.fits(room, host_bytes, here):
        return here
    raise InputError(
        f"{needs.config.name} needs {needs.on_device(here) / GIB:.2f} GiB on the device and "
        f"{needs.on_host(here) / GIB:.2f} in host memory with the KV cache of {here} of "
        f"{needs.config.num_layers} layers on the device, got {device_bytes / GIB:.2f} and "
        f"{host_bytes / GIB:.2f}",
        "shorten the text",
        "use offload=True",
        "lower prefill_chunk=",
        "take a smaller model",
        "use more GPUs (torchrun)",
    )
