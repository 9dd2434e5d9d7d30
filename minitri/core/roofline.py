"""How long a forward pass takes if only bytes count: a pass reads every weight and all cached K and
V once, however few tokens it computes. For the autotuner before it has measured anything, and for
`python -m minitri plan`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from minitri.core.config import ModelConfig

if TYPE_CHECKING:
    from minitri.core.model.llama import Llama

GROUP = 128
"""Successive weights of a row that share a scale, of 4 bytes, in a GPU's copy in few bits."""


@dataclass(frozen=True)
class Machine:
    """What the bytes move through, and what else a pass costs."""

    weight_bytes_per_second: float
    kv_bytes_per_second: float
    link_bytes_per_second: float
    """From host memory to the device."""
    seconds_per_layer: float = 0.0
    """Launches, small operations, Python; `seconds_per_pass`: sampling, a verdict."""
    seconds_per_pass: float = 0.0
    share_per_extra_token: float = 0.0
    """What each token of a block but the first of each row adds, as a share of the pass."""
    share_in_four_bits: float = 0.0
    """As `share_per_extra_token`, of a copy in 4 bits, whose weights take less time to read."""
    flops_per_second: float = 1e18


CPU = Machine(
    30e9,
    25e9,
    25e9,
    seconds_per_layer=0.08e-3,
    seconds_per_pass=0.8e-3,
    share_per_extra_token=0.06,
    share_in_four_bits=0.2,
)
NARROW_CPU = replace(CPU, share_per_extra_token=0.16, share_in_four_bits=0.25)
"""Without AVX-512: bound by arithmetic sooner."""
GPU = Machine(2e12, 2e12, 25e9, seconds_per_layer=0.05e-3, share_per_extra_token=0.01)
"""Nominal machines: of the right order where nothing was measured, and the same in every run."""


def card(speed: float, link: float, flops: float) -> Machine:
    """A GPU by bytes and FLOPs per second. A layer is 12 launches in a CUDA graph, a pass a verdict
    and a copy to the host; what several GPUs send to one another is left out."""
    return Machine(speed, speed, link, 16e-6, 0.15e-3, flops_per_second=flops)


CARDS = {
    48: card(1e12, 25e9, 100e12),
    80: card(2e12, 25e9, 200e12),
    1e9: card(4e12, 25e9, 500e12),
}
"""By memory in GiB: smaller cards, an A100 and an H200, with PCIe 4.0 x16."""


def outline(config: ModelConfig) -> "Llama":
    """The network of a config, with no memory for its weights."""
    import torch  # not needed by those who only ask what cards there are

    from minitri.core.model.llama import Llama

    return Llama(config, dtype=torch.float16, device=torch.device("meta"))


@cache
def weights_per_pass(config: ModelConfig) -> int:
    """Numbers of the weights that a pass reads: of an untied embedding table only some rows."""
    weights = outline(config).named_parameters()
    return sum(weight.numel() for name, weight in weights if name != "embed_tokens")


def num_weights(config: ModelConfig) -> int:
    """Numbers in a model's weights; of a drafter without an embedding table, its own only."""
    has_table = not config.tie_word_embeddings and config.draft_of is None
    return weights_per_pass(config) + has_table * config.vocab_size * config.hidden_size


def bytes_per_pass(model: "Llama") -> int:
    """Bytes of the weights that a pass of this very model reads, quantized or not."""
    weights = (getattr(module, "weight", None) for module in model.modules())
    return sum(weight.nbytes for weight in weights if weight is not None)


@cache
def copy_bytes(config: ModelConfig, bits: int) -> int:
    """Bytes of a copy in 4 or 8 bits (`devices/gpu/quantized_copies.py`); 0 bits: of none."""

    def size(layer: Any, bits: int) -> int:
        return layer.out_features * -(-layer.in_features // GROUP) * (GROUP * bits // 8 + 4)

    model = outline(config)
    layers = sum(size(it, bits) for it in model.layers.modules() if hasattr(it, "in_features"))
    return layers + size(model.lm_head, 8) if bits else 0


@dataclass(frozen=True)
class Pass:
    """What a forward pass reads, moves and computes, on each GPU."""

    num_layers: int
    weight_bytes: float
    kv_bytes: float
    link_bytes: float
    """The part of the KV that comes from host memory, while all else goes on: the slower counts."""
    flops: float
    num_extra_tokens: float
    is_in_four_bits: bool

    def seconds(self, machine: Machine) -> float:
        seconds = machine.seconds_per_pass + self.num_layers * machine.seconds_per_layer
        seconds += self.weight_bytes / machine.weight_bytes_per_second
        seconds += self.kv_bytes / machine.kv_bytes_per_second
        seconds = max(seconds, self.link_bytes / machine.link_bytes_per_second)
        in_four_bits = self.is_in_four_bits
        share = machine.share_in_four_bits if in_four_bits else machine.share_per_extra_token
        seconds *= 1 + share * self.num_extra_tokens
        return max(seconds, self.flops / machine.flops_per_second)


@dataclass(frozen=True)
class Workload:
    """What is decoded, and where it stands."""

    target: ModelConfig
    """Of several GPUs that share a model, the share of each."""
    draft: ModelConfig | None
    """None: lookup, which takes no pass."""
    num_tokens: int
    """In the full cache, all rows together, as `num_retrieved` in the retrieval cache."""
    num_retrieved: int
    itemsize: int = 2
    hosted_share: float = 0.0
    """Of the full cache, in host memory."""
    pass_bytes: Mapping[str, int] = field(default_factory=dict)
    """By stage, of the weights that a pass reads, where the config does not imply them."""
    batch_size: int = 1

    @property
    def slot_bytes(self) -> int:
        return self.target.kv_values_per_token * self.itemsize

    def read(self, stage: str, num_guesses: float) -> Pass:
        """A pass of a stage ("draft", "retrieval", "target") over guesses and a token per row."""
        config = self.draft if stage == "draft" else self.target
        assert config is not None
        num_weights = weights_per_pass(config)
        whole = num_weights * self.itemsize
        weight_bytes = self.pass_bytes.get(stage) or whole
        slots = {"draft": 0, "retrieval": self.num_retrieved, "target": self.num_tokens}[stage]
        kv_bytes = slots * self.slot_bytes
        attention = 4 * config.num_heads * config.head_dim * config.num_layers * slots
        num_tokens = self.batch_size * (num_guesses + 1)
        return Pass(
            config.num_layers,
            weight_bytes,
            kv_bytes,
            link_bytes=self.hosted_share * kv_bytes if stage == "target" else 0.0,
            flops=num_tokens * (2 * num_weights + attention / self.batch_size),
            num_extra_tokens=self.batch_size * num_guesses,
            is_in_four_bits=stage != "target" and weight_bytes < whole / 2,
        )

    def seconds(self, machine: Machine, stage: str, num_guesses: float) -> float:
        """Of `read`; 0 of lookup, which takes no pass."""
        if stage == "draft" and self.draft is None:
            return 0.0
        return self.read(stage, num_guesses).seconds(machine)
