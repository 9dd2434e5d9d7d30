"""A Hugging Face config.json, and `--rope-scaling`: from words to a `ModelConfig`."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from minitri.config import ROPE_KINDS, ModelConfig, RopeConfig
from minitri.errors import InputError, explain, shorten
from minitri.loading.values import as_token_ids, read_fields, read_value, require
from minitri.settings import SamplingParams

log = logging.getLogger("minitri")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"attention_bias": True, "output_bias": False},
    "qwen3": {"head_norm": True},
}
"""Architectures by the `model_type` of their config.json, and what each adds to a Llama."""

_NEEDED = {"num_layers", "hidden_size", "intermediate_size", "num_heads", "vocab_size"}
_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "context_length": "max_position_embeddings",
}
_TRAINED = "original_max_position_embeddings"
_ROPE_KEYS = {"theta": "rope_theta", "kind": "rope_type", "original_context": _TRAINED}
_RUNS = {"hidden_act": "silu", "mlp_bias": False, "quantization_config": None}
_RUNS |= {"partial_rotary_factor": 1.0, "mscale": None, "mscale_all_dim": None}


def check_family(kind: Any, name: str) -> None:
    """Raises `InputError` for a `model_type` that minitri does not run."""
    if kind not in list(FAMILIES):  # it may be of any type
        raise InputError(
            f"{name} is a {shorten(repr(kind), 60)} model; use one of a kind that minitri runs: "
            f"{', '.join(FAMILIES)}"
        )


def read_config(config: Mapping[str, Any], name: str) -> ModelConfig:
    """From a Hugging Face config.json. Raises `InputError` for a model of another family."""
    kind = config.get("model_type")
    check_family(kind, name)
    left_out: dict[str, Any] = {}
    needed = _NEEDED | {"num_kv_heads", "context_length"}
    if kind == "llama":  # others have defaults of their own
        left_out |= {"num_kv_heads": config.get("num_attention_heads"), "context_length": 2048}
        needed = _NEEDED
    with explain(f"the config of {name} holds a wrong value", "get the original"):
        runs: dict[str, Any] = {"sliding_window": None, **_RUNS}
        runs["layer_types"] = ["full_attention"] * len(config.get("layer_types") or ())
        if config.get("use_sliding_window") is False:
            del runs["sliding_window"]
        require(config, runs, name)
        bos = next(iter(as_token_ids(config.get("bos_token_id"))), None)
        found = left_out | read_fields({**config, "bos_token_id": bos}, ModelConfig, _KEYS, needed)
        found.setdefault("head_dim", found["hidden_size"] // max(found["num_heads"], 1))
        found |= {"name": name, "eos_token_ids": as_token_ids(config.get("eos_token_id"))}
        found["rope"] = _read_rope(config, found["context_length"], name)
        return ModelConfig(**found | FAMILIES[str(kind)])


def _read_rope(config: Mapping[str, Any], context: int, name: str) -> RopeConfig:
    """RoPE's part of a config.json, in its older form (`rope_scaling`) or its newer one."""
    scaling: dict[str, Any] = {}
    for form in ("rope_parameters", "rope_scaling"):
        scaling = read_value(config, form, dict) or scaling
    require(scaling, _RUNS, name)
    given = {key: value for key, value in scaling.items() if value is not None}
    given = {"rope_theta": config.get("rope_theta"), "rope_type": given.get("type"), **given}
    if config.get(_TRAINED) is not None:
        given[_TRAINED] = config[_TRAINED]
    is_plain = given["rope_type"] in (None, "default", "none")
    found = read_fields(given, RopeConfig, _ROPE_KEYS, () if is_plain else ("factor",))
    if is_plain:
        return RopeConfig(found.get("theta", RopeConfig.theta))
    return RopeConfig(**{"original_context": context, **found})


def stretch_rope(config: ModelConfig, text: str) -> ModelConfig:
    """A model stretched by a command-line setting such as `yarn:4`; its context grows, too.

    The factor counts from the context of the training: `yarn:4` on an 8K model gives 32K,
    whatever scaling its config already had. `none` takes a scaling away.
    """
    if config.rope.frequency_divisors is not None:
        raise InputError(
            f"{config.name} brings a stretched RoPE of its own (rope_freqs in the GGUF file), "
            "which --rope-scaling cannot replace; leave it out"
        )
    theta = config.rope.theta
    base = config.rope.original_context or config.context_length
    if text == "none":
        return dataclasses.replace(config, rope=RopeConfig(theta), context_length=base)
    with explain(
        f"--rope-scaling {text!r} is not KIND:FACTOR", "write for example yarn:4, or none"
    ):
        kind, factor = text.split(":")
        if kind not in ROPE_KINDS[1:]:
            raise ValueError(f"KIND is one of {', '.join(ROPE_KINDS[1:])}")
        rope = RopeConfig(theta, kind, float(factor), base)
        return dataclasses.replace(config, rope=rope, context_length=int(base * rope.factor))


def read_sampling(settings: Mapping[str, Any], name: str) -> SamplingParams:
    """How a generation_config.json wants texts to be sampled: greedily unless `do_sample` is true.

    Malformed values warn, and are as none.
    """
    greedy = SamplingParams()
    if settings.get("do_sample") is not True:
        return greedy
    given = {field: settings[field] for field in vars(greedy) if settings.get(field) is not None}
    try:
        return SamplingParams(**{"temperature": 1.0, **given})
    except InputError as error:
        log.warning("%s: generation_config.json is not followed: %s", name, error)
        return greedy
