"""A Hugging Face config.json, and `--rope-scaling`: from words to a `ModelConfig`.

Null is as good as absent. No value is rounded or replaced: the dataclasses check what they get.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from minitri.core.config import ModelConfig, RopeConfig
from minitri.core.errors import InputError, explain, shorten
from minitri.core.log import log
from minitri.core.settings import SamplingParams

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"attention_bias": True, "output_bias": False},
    "qwen3": {"head_norm": True},
}
"""Architectures by the `model_type` of their config.json, and what each adds to a Llama."""

_TRAINED = "original_max_position_embeddings"
_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "context_length": "max_position_embeddings",
}
"""The file's own names of fields."""
_RUNS = {"hidden_act": "silu", "mlp_bias": False, "quantization_config": None}
_RUNS |= {"partial_rotary_factor": 1.0, "mscale": None, "mscale_all_dim": None}


def read_config(settings: Mapping[str, Any], name: str) -> ModelConfig:
    """From a Hugging Face config.json. Raises `InputError` for a model of another family."""
    kind: Any = settings.get("model_type")
    if kind not in list(FAMILIES):  # it may be of any type
        raise InputError(
            f"{name} is a {shorten(repr(kind), 60)} model; use one of a kind that minitri runs: "
            f"{', '.join(FAMILIES)}"
        )
    with explain(f"the config of {name} holds a wrong value", "get the original"):
        given = _without_null(settings)
        if given.get("use_sliding_window") is False:
            given.pop("sliding_window", None)
        layer_types = ["full_attention"] * len(given.get("layer_types", ()))
        require(given, _RUNS | {"layer_types": layer_types, "sliding_window": None}, name)
        if kind == "llama":  # others have defaults of their own
            given.setdefault("num_key_value_heads", given.get("num_attention_heads"))
            given.setdefault("max_position_embeddings", 2048)
        found = _fields(ModelConfig, given) | FAMILIES[kind]
        eos = given.get("eos_token_id", [])  # one or several
        found["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else (eos,)
        found |= {"name": name, "rope": _read_rope(given, name)}
        config = ModelConfig(**{"head_dim": 2, **found})
        head_dim = found.get("head_dim", config.hidden_size // config.num_heads)
        return dataclasses.replace(config, head_dim=head_dim)


def _without_null(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


def _fields(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that a file has."""
    keys = {field.name: _KEYS.get(field.name, field.name) for field in dataclasses.fields(kind)}
    return {field: given[key] for field, key in keys.items() if key in given}


def _read_rope(given: Mapping[str, Any], name: str) -> RopeConfig:
    """RoPE's part of a config.json, in its older form (`rope_scaling`) or its newer one."""
    scaling: dict[str, Any] = {}
    for form in ("rope_parameters", "rope_scaling"):
        found = given.get(form, {})
        if not isinstance(found, dict):
            raise TypeError(f"{form} is no object")
        scaling = _without_null(found) or scaling
    require(scaling, _RUNS, name)
    theta = scaling.get("rope_theta", given.get("rope_theta", RopeConfig.theta))
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in (None, "default", "none"):
        return RopeConfig(theta)
    context = scaling.get(_TRAINED, given.get("max_position_embeddings"))
    return RopeConfig(
        **{
            **_fields(RopeConfig, scaling),
            "theta": theta,
            "kind": kind,
            "factor": scaling["factor"],
            "original_context": given.get(_TRAINED, context),
            "frequency_divisors": None,
        }
    )


def require(settings: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> None:
    """Raises `InputError` for a setting of which minitri runs the wanted value only."""
    for key, value in wanted.items():
        found = settings.get(key)
        is_alike = isinstance(found, bool) == isinstance(value, bool)
        if found is not None and not (is_alike and found == value):
            raise InputError(
                f"{name} has {key}={shorten(repr(found), 60)}, which minitri does not run; use a "
                f"model with {key}={shorten(value, 60)}"
            )


def stretch_rope(config: ModelConfig, text: str) -> ModelConfig:
    """A model stretched by a setting such as `yarn:4`, whatever scaling its config already had."""
    if config.rope.frequency_divisors is not None:
        raise InputError(
            f"{config.name} brings a stretched RoPE of its own (rope_freqs in the GGUF file), "
            "which rope_scaling= cannot replace; leave it out"
        )
    problem = f"rope_scaling={text!r} is not KIND:FACTOR"
    with explain(problem, "write for example yarn:4"):
        kind, factor = text.split(":")
        if kind == "default":
            raise ValueError("it stretches nothing")
        base = config.rope.original_context or config.context_length
        try:
            rope = RopeConfig(config.rope.theta, kind, float(factor), base)
        except InputError as error:
            raise InputError(f"rope_scaling={text!r}: {error}") from None
        return dataclasses.replace(config, rope=rope, context_length=int(base * rope.factor))


def read_sampling(settings: Mapping[str, Any], name: str) -> SamplingParams:
    """How a generation_config.json samples: greedily unless `do_sample`. Malformed values warn."""
    if settings.get("do_sample") is True:
        try:
            given = _fields(SamplingParams, _without_null(settings))
            return SamplingParams(**{"temperature": 1.0, **given})
        except InputError as error:
            log.warning("%s: generation_config.json is not followed: %s", name, error)
    return SamplingParams()
