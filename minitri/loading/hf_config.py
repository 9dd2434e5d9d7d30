"""A Hugging Face config.json, and `--rope-scaling`: from words to a `ModelConfig`."""

import dataclasses
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from minitri.errors import InputError, shorten
from minitri.loading.damage import explain
from minitri.model.config import POSITIVE_FACTORS, ROPE_KINDS, ModelConfig, RopeConfig


def read_config(config: Mapping[str, Any], name: str) -> ModelConfig:
    """From the dictionary in a Hugging Face config.json. Raises `InputError` for no Llama."""
    kind = config.get("model_type")
    if kind != "llama":
        raise InputError(
            f"{name} is a {kind!r} model; minitri runs the Llama architecture (model_type "
            "'llama') only"
        )
    required = {"hidden_act": "silu", "mlp_bias": False, "quantization_config": None}
    for key, wanted in required.items():
        if config.get(key, wanted) != wanted:
            raise InputError(
                f"{name} has {key}={shorten(repr(config[key]), 60)}, which minitri does not "
                f"run; use a checkpoint with {key}={wanted}"
            )
    for value in map(config.get, ("tie_word_embeddings", "attention_bias")):
        if value not in (None, True, False):
            raise InputError(
                f"config has {shorten(repr(value), 60)} where true or false belongs; correct it"
            )
    wrong_kind = (TypeError, ValueError, ZeroDivisionError, OverflowError)
    problem = f"{name}: config.json holds a value of the wrong kind"
    try:
        with explain(problem, *wrong_kind, advice="get the original"):
            return read_fields(config, name)
    except KeyError as missing:
        raise InputError(
            f"{name}: config.json has no {missing}; get the complete config of the model"
        ) from None


def read_fields(config: Mapping[str, Any], name: str) -> ModelConfig:
    """The fields of a config.json; raises whatever a wrong or missing value leads to."""
    num_heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
    context, draft_of = int(config.get("max_position_embeddings", 2048)), config.get("draft_of")
    return ModelConfig(
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or hidden_size // num_heads),
        vocab_size=int(config["vocab_size"]),
        context_length=context,
        rope=read_rope(config, context),
        rms_norm_eps=float(config.get("rms_norm_eps", ModelConfig.rms_norm_eps)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
        attention_bias=bool(config.get("attention_bias")),
        bos_token_id=next(iter(as_token_ids(config.get("bos_token_id"))), None),
        eos_token_ids=as_token_ids(config.get("eos_token_id")),
        name=name,
        draft_of=None if draft_of is None else str(draft_of),
        head_size=None if draft_of is None else int(config["head_size"]),
    )


def read_rope(config: Mapping[str, Any], default_context: int) -> RopeConfig:
    """From a Hugging Face config.json, in its older form (`rope_scaling`) or its newer one."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if (scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
        raise InputError(
            "RoPE turns only a part of each head (partial_rotary_factor), which no Llama does; "
            "check it"
        )
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or RopeConfig.theta)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if scaling.get("factor") is None:
        raise InputError(
            f"RoPE type {kind} has no factor, got {shorten(scaling)}; set it in config.json"
        )
    if scaling.get("mscale") or scaling.get("mscale_all_dim"):
        raise InputError(
            "RoPE scaling uses mscale, which Llama models do not; set attention_factor instead"
        )
    original = int(scaling.get("original_max_position_embeddings") or default_context)
    options: dict[str, Any] = {"truncate": bool(scaling.get("truncate", True))}
    for name in (*POSITIVE_FACTORS, "attention_factor"):
        if scaling.get(name) is not None:
            options[name] = float(scaling[name])
    return RopeConfig(theta, kind, float(scaling["factor"]), original, **options)


def stretch_rope(config: ModelConfig, text: str) -> ModelConfig:
    """A model stretched by a command-line setting such as `yarn:4`; its context grows, too.

    The factor counts from the context of the training: `yarn:4` on an 8K model gives 32K,
    whatever scaling its config already had. `none` takes a scaling away.
    """
    if config.rope.frequency_divisors is not None:
        raise InputError(
            f"{config.name} brings a stretched RoPE of its own (rope_freqs in the GGUF file), "
            "which --rope-scaling cannot replace; use the model's Hugging Face folder, or "
            "leave the flag out"
        )
    theta, base = config.rope.theta, config.rope.original_context or config.context_length
    if text == "none":
        return dataclasses.replace(config, rope=RopeConfig(theta), context_length=base)
    kind, _, number = text.partition(":")
    factor = math.nan
    with suppress(ValueError):
        factor = float(number)
    if kind not in ROPE_KINDS[1:] or not (1 <= factor <= 1024):
        raise InputError(
            f"--rope-scaling {text!r} is not KIND:FACTOR with KIND one of "
            f"{', '.join(ROPE_KINDS[1:])} and FACTOR from 1 to 1024; write for example yarn:4, "
            "or none"
        )
    rope = RopeConfig(theta, kind, factor, base)
    return dataclasses.replace(config, rope=rope, context_length=int(base * factor))


def as_token_ids(value: Any) -> tuple[int, ...]:
    """An `eos_token_id` of a config, which may be absent, one number, or several."""
    tokens = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise InputError(
            f"config has the token id {shorten(repr(value), 60)}, which is no whole number; "
            "correct it"
        )
    return tokens
