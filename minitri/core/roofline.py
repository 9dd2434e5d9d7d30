"""Roofline model: predicts the seconds of a forward pass from the bytes that it reads.

A pass reads every weight and all cached K and V once, however few tokens it computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from minitri.core.config import ModelConfig

if TYPE_CHECKING:
    from minitri.core.model.llama import Llama

GROUP = 128  # weights of a row that share a scale of 4 bytes, in a quantized copy on a GPU


@dataclass(frozen=True)
class Machine:
    """Bandwidths of a machine, and other costs of a forward pass on it."""

    bytes_per_second: float  # at which a pass reads weights, K and V
    link_bytes_per_second: float  # from host memory to the device
    seconds_per_layer: float = 0.0  # launches, small operations, Python
    seconds_per_pass: float = 0.0  # sampling and the verdict
    # Time that each further token of a row adds, as shares of the time for K and V, of all else,
    # and of the weights' time if these have at most 8 bits.
    share_of_kv: float = 0.0
    share_of_rest: float = 0.0
    share_of_few_bits: float = 0.0
    flops_per_second: float = 1e18  # arithmetic, the limit of long blocks


# Nominal machines: of the right order of magnitude, and the same in every run.
# Fitted to tables of section "... what auto gains, in forty settings" of tools/RESULTS.md.
CPU = Machine(30e9, 25e9, 0.05e-3, 0.4e-3, 0.15, 0.03, 0.16, flops_per_second=300e9)
# Without AVX-512 it is bound by arithmetic sooner: section "what a pass ... really costs".
NARROW_CPU = replace(CPU, share_of_kv=0.4, share_of_rest=0.08, flops_per_second=180e9)
GPU = Machine(2e12, 25e9, 0.05e-3, share_of_kv=0.01, share_of_rest=0.01)


def card(speed: float, flops: float, link: float = 25e9) -> Machine:
    """A GPU with `speed` bytes/s, `flops` FLOP/s, `link` bytes/s from the host; usual latencies."""
    return Machine(speed, link, 16e-6, 0.15e-3, flops_per_second=flops)


CARDS = {48: card(1e12, 100e12), 80: card(2e12, 200e12), 1e9: card(4e12, 500e12)}
"""Typical GPUs by memory in GiB: small cards, an A100 and an H200, with PCIe 4.0 x16."""


def outline(config: ModelConfig) -> "Llama":
    """The model of a config on the meta device, without memory for its weights."""
    import torch  # `minitri plan --help` needs only `CARDS`

    from minitri.core.model.llama import Llama

    return Llama(config, dtype=torch.float16, device=torch.device("meta"))


@cache
def weights_per_pass(config: ModelConfig) -> int:
    """Number of weights that a pass reads: all but the embedding table, of which it reads few."""
    weights = outline(config).named_parameters()
    return sum(weight.numel() for name, weight in weights if name != "embed_tokens.weight")


def num_weights(config: ModelConfig) -> int:
    """Number of weights; a tied embedding table counts once, a table shared with a target not."""
    has_table = not config.tie_word_embeddings and config.draft_of is None
    return weights_per_pass(config) + has_table * config.vocab_size * config.hidden_size


def bytes_per_pass(model: "Llama") -> int:
    """Bytes of weights that a pass of a loaded model reads, quantized or not."""
    modules = (module for name, module in model.named_modules() if name != "embed_tokens")
    weights = (getattr(module, "weight", None) for module in modules)
    return sum(weight.nbytes for weight in weights if weight is not None)


@cache
def copy_bytes(config: ModelConfig, bits: int) -> int:
    """Bytes of the weights quantized to 4 or 8 `bits` each, the LM head to 8; 0 for 0 bits."""
    num_bytes = 0
    for name, weight in outline(config).named_parameters():
        if bits and weight.dim() == 2 and name != "embed_tokens.weight":
            num_groups = len(weight) * -(-weight.shape[1] // GROUP)
            num_bytes += num_groups * (GROUP * (8 if name == "lm_head.weight" else bits) // 8 + 4)
    return num_bytes


def default_copy_bits(config: ModelConfig, num_free: float) -> int:
    """Bits of a quantized copy of the weights: 4 if <= a tenth of `num_free` free bytes, else 0."""
    return 4 if copy_bytes(config, 4) <= num_free / 10 else 0


@dataclass(frozen=True)
class PassCost:
    """Bytes and FLOPs of one forward pass, on each GPU."""

    num_layers: int
    weight_bytes: float  # weights that the pass reads
    kv_bytes: float  # cached K and V that the pass reads
    link_bytes: float  # K and V that are copied from host memory during the pass
    flops: float
    num_extra_tokens: float  # tokens after the first of each row, all rows together
    is_in_few_bits: bool  # whether the weights have at most 8 bits

    def seconds(self, machine: Machine) -> float:
        seconds = machine.seconds_per_pass + self.num_layers * machine.seconds_per_layer
        weights = self.weight_bytes / machine.bytes_per_second
        kv = self.kv_bytes / machine.bytes_per_second
        seconds += weights
        extra = machine.share_of_kv * kv + machine.share_of_rest * seconds
        extra += machine.share_of_few_bits * self.is_in_few_bits * weights
        seconds = max(seconds + kv, self.link_bytes / machine.link_bytes_per_second)
        seconds += extra * self.num_extra_tokens
        return max(seconds, self.flops / machine.flops_per_second)


@dataclass(frozen=True)
class Workload:
    """Models and cached tokens of a decoding step, from which the costs of its passes follow."""

    target: ModelConfig
    """The target; with several GPUs the share of each, see `ModelConfig.share`."""
    draft: ModelConfig | None  # None: guesses are looked up in the text, which takes no pass
    num_tokens: int  # in the full cache, all rows together
    num_retrieved: int  # in the retrieval cache, all rows together
    itemsize: int = 2  # bytes of a number, in weights and in KV caches
    hosted_share: float = 0.0  # share of the full cache that is in host memory
    pass_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes of weights that a pass reads, by stage, where they do not follow from the config."""
    batch_size: int = 1  # rows

    def read(self, stage: str, num_guesses: float) -> PassCost:
        """Cost of a pass of `stage`, such as draft, over 1 + `num_guesses` tokens per row."""
        config = self.draft if stage == "draft" else self.target
        assert config
        num_weights = weights_per_pass(config)
        weight_bytes = self.pass_bytes.get(stage) or num_weights * self.itemsize
        slots = {"draft": 0, "retrieval": self.num_retrieved, "target": self.num_tokens}[stage]
        if slots and config.window:
            seen = min(config.window * self.batch_size, self.num_tokens)
            slots += (seen - slots) * len(config.sliding_layers) // config.num_layers
        kv_bytes = slots * self.target.kv_values_per_token * self.itemsize
        attention = 4 * config.num_heads * config.head_dim * config.num_layers * slots
        return PassCost(
            config.num_layers,
            weight_bytes,
            kv_bytes,
            link_bytes=self.hosted_share * kv_bytes if stage == "target" else 0.0,
            flops=(num_guesses + 1) * (2 * num_weights * self.batch_size + attention),
            num_extra_tokens=self.batch_size * num_guesses,
            is_in_few_bits=weight_bytes < 1.5 * num_weights,
        )

    def seconds(self, machine: Machine, stage: str, num_guesses: float) -> float:
        """Predicted seconds of a pass of `stage` with `num_guesses` per row; 1e-9 for lookup."""
        if stage == "draft" and not self.draft:
            return 1e-9
        return self.read(stage, num_guesses).seconds(machine)
