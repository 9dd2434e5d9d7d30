"""How long a forward pass takes if only bytes count: bytes over bandwidth, from a `ModelConfig`.

Decoding is bound by memory: a pass reads every weight and all cached K and V once, however few
tokens it computes. This is the one model of that, used by the autotuner before it has measured
anything, by `python -m minitri.plan`, and by benchmarks that say how far from it they are.

Legend: L layers, K KV heads, D head dim, E hidden size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from minitri.config import ModelConfig
from minitri.model.llama import Llama


@dataclass(frozen=True)
class Machine:
    """What the bytes move through, and what a pass costs besides."""

    weight_bytes_per_second: float
    kv_bytes_per_second: float
    link_bytes_per_second: float
    """From host memory to the device."""
    seconds_per_layer: float = 0.0
    """Whatever is in it: launches, small operations, Python."""
    seconds_per_pass: float = 0.0
    """Whatever is around it: sampling, a verdict."""
    share_per_extra_token: float = 0.0
    """What each token of a block but the first of each row adds, as a share of the pass."""
    share_in_four_bits: float = 0.0
    """The same where the weights are a copy in 4 bits, so that reading them counts for less."""
    # What only the ledger counts, `benchmarks/ledger.py`:
    flops_per_second: float = math.inf
    seconds_per_launch: float = 0.0
    """Of a kernel on the device, beside its bytes."""
    seconds_per_eager_launch: float = 0.0
    """On the host, of a kernel outside of CUDA graphs."""
    seconds_per_round_trip: float = 0.0
    """Of the host's waiting for the device, in which that does nothing."""
    seconds_per_sum: float = 0.0
    """Of a small tensor over all GPUs."""


CPU = Machine(
    30e9, 25e9, 25e9, seconds_per_layer=0.08e-3, seconds_per_pass=0.8e-3,
    share_per_extra_token=0.06, share_in_four_bits=0.2,
)  # fmt: skip
GPU = Machine(2e12, 2e12, 25e9, seconds_per_layer=0.05e-3, share_per_extra_token=0.01)
"""Nominal machines: of the right order where nothing was measured, and the same in every run."""


def num_weights(config: ModelConfig) -> int:
    """Numbers in a model's weights; of a drafter without an embedding table, its own only."""
    E, inner, D = config.hidden_size, config.intermediate_size, config.head_dim
    qkv_heads = config.num_heads + 2 * config.num_kv_heads
    layer = E * D * (qkv_heads + config.num_heads) + 3 * E * inner + 2 * E
    if config.attention_bias:
        layer += D * qkv_heads
    if config.attention_bias if config.output_bias is None else config.output_bias:
        layer += E
    layer += 2 * D * config.head_norm
    head = config.vocab_size if config.head_size is None else config.head_size
    tables = 1 if config.tie_word_embeddings or config.draft_of is not None else 2
    return config.num_layers * layer + E + tables * head * E


def weights_per_pass(config: ModelConfig) -> int:
    """Numbers of the weights that a pass reads: of an untied embedding table only some rows."""
    is_untied = not config.tie_word_embeddings and config.draft_of is None
    return num_weights(config) - is_untied * config.vocab_size * config.hidden_size


def bytes_per_pass(model: Llama) -> int:
    """Bytes of the weights that a pass of this very model reads, quantized or not."""
    weights = (getattr(module, "weight", None) for module in model.modules())
    return sum(weight.nbytes for weight in weights if weight is not None)


def four_bit_bytes(config: ModelConfig) -> int:
    """Bytes of a model's copy in 4 bits, its LM head in 8, scales included: `cpu/quantized.py`."""
    E, D, inner = config.hidden_size, config.head_dim, config.intermediate_size

    def row(length: int) -> int:
        return -(-length // 64) * 32 + length // 32 * 4

    layer = (config.num_heads + 2 * config.num_kv_heads) * D * row(E) + 2 * inner * row(E)
    layer += E * (row(config.num_heads * D) + row(inner))
    return config.num_layers * layer + config.vocab_size * (-(-E // 64) * 64 + E // 32 * 2)


def eight_bit_bytes(config: ModelConfig) -> int:
    """Bytes of a copy in 8 bits with a scale of 4 bytes per row: `gpu/quantized.py`."""
    E, inner = config.hidden_size, config.intermediate_size
    heads_width = config.num_heads * config.head_dim
    rows = heads_width + 2 * config.num_kv_heads * config.head_dim + 2 * inner
    layer = rows * (E + 4) + E * (heads_width + 4 + inner + 4)
    return config.num_layers * layer + config.vocab_size * (E + 4)


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes of K and V of one token in all layers."""
    return config.kv_values_per_token * itemsize


def pass_seconds(
    machine: Machine, config: ModelConfig, *, weight_bytes: float, kv_bytes: float = 0.0,
    link_bytes: float = 0.0, num_extra_tokens: float = 0.0, is_in_four_bits: bool = False,
) -> float:  # fmt: skip
    """Seconds of a forward pass that reads so many bytes.

    `link_bytes` is the part of the KV that comes from host memory, beside everything that computes,
    so the slower of the two counts.
    """
    seconds = machine.seconds_per_pass + config.num_layers * machine.seconds_per_layer
    seconds += weight_bytes / machine.weight_bytes_per_second
    seconds += kv_bytes / machine.kv_bytes_per_second
    seconds = max(seconds, link_bytes / machine.link_bytes_per_second)
    share = machine.share_in_four_bits if is_in_four_bits else machine.share_per_extra_token
    return seconds * (1 + share * num_extra_tokens)


def pass_costs(
    target: ModelConfig, draft: ModelConfig | None, *, machine: Machine, itemsize: int,
    num_tokens: int, num_retrieved: int, hosted_share: float = 0.0,
    target_bytes: int | None = None, guesser_bytes: int | None = None, batch_size: int = 1,
) -> Callable[[str, float], float]:  # fmt: skip
    """Nominal seconds of a pass of each stage, for the autotuner.

    The full cache holds `num_tokens` in all its `batch_size` rows together, a share of them in host
    memory, the retrieval cache `num_retrieved`. A pass of the target reads weights of
    `target_bytes`, one of the retrieval level `guesser_bytes`; by default what the config implies.
    The function returned takes the stage ("draft", "retrieval" or "target") and the guesses that
    the pass verifies in each row.
    """
    slot_bytes = kv_bytes_per_token(target, itemsize)

    def seconds(stage: str, num_guesses: float) -> float:
        config = draft if stage == "draft" else target
        if config is None:
            return 0.0  # lookup takes no pass
        slots = {"draft": 0, "retrieval": num_retrieved, "target": num_tokens}[stage]
        hosted = hosted_share if stage == "target" else 0.0
        kv_bytes = slots * slot_bytes
        weight_bytes = {"target": target_bytes, "retrieval": guesser_bytes}.get(stage)
        whole = weights_per_pass(config) * itemsize
        is_in_four_bits = stage == "retrieval" and (guesser_bytes or whole) < whole / 2
        if weight_bytes is None:
            weight_bytes = whole
        return pass_seconds(
            machine, config, weight_bytes=weight_bytes, kv_bytes=kv_bytes,
            link_bytes=hosted * slots * slot_bytes, num_extra_tokens=batch_size * num_guesses,
            is_in_four_bits=is_in_four_bits,
        )  # fmt: skip

    return seconds
