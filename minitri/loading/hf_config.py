"""A Hugging Face config.json, and `--rope-scaling`: from words to a `ModelConfig`."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from minitri.config import ROPE_KINDS, ModelConfig, RopeConfig
from minitri.errors import InputError, shorten
from minitri.settings import SamplingParams

log = logging.getLogger("minitri")

_ROPE_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"attention_bias": True, "output_bias": False},
    "qwen3": {"head_norm": True},
}
"""Architectures by the `model_type` of their config.json, and what each adds to a Llama."""

_WITHOUT_DEFAULT = ("num_key_value_heads", "max_position_embeddings")
"""What a config.json may leave out for a Llama only: others have defaults of their own."""


def family(kind: Any, name: str) -> dict[str, Any]:
    """What an architecture adds to a Llama's parts. Raises `InputError` for others."""
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError(
            f"{name} is a {shorten(repr(kind), 60)} model; use one of a kind that minitri runs: "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[kind]


def read_config(config: Mapping[str, Any], name: str) -> ModelConfig:
    """From a Hugging Face config.json. Raises `InputError` for a model of another family."""
    own = family(config.get("model_type"), name)
    wrong_kind = (TypeError, ValueError, ZeroDivisionError, OverflowError)
    problem = f"{name}: config.json holds a value of the wrong kind"
    try:
        with explain(problem, *wrong_kind, advice="get the original"):
            check_supported(config, name)
            for key in () if config["model_type"] == "llama" else _WITHOUT_DEFAULT:
                read_value(config, key, int)
            return dataclasses.replace(read_fields(config, name), **own)
    except KeyError as missing:
        raise InputError(
            f"{name}: config.json has no {missing}; get the complete config of the model"
        ) from None


def check_supported(config: Mapping[str, Any], name: str) -> None:
    """Raises `InputError` for what the architectures allow and minitri does not run."""
    required = {"hidden_act": "silu", "mlp_bias": False, "quantization_config": None}
    if config.get("use_sliding_window") is not False:
        required["sliding_window"] = None
    for key, wanted in required.items():
        found = config.get(key)
        if found is not None and (found != wanted or type(found) is not type(wanted)):
            raise InputError(
                f"{name} has {key}={shorten(repr(found), 60)}, which minitri does not "
                f"run; use a checkpoint with {key}={wanted}"
            )
    others = set(map(str, config.get("layer_types") or ())) - {"full_attention"}
    if others:
        raise InputError(
            f"{name} has layers of the type {shorten(min(others), 60)}, which minitri does not "
            "run; use a model whose layers all have full_attention"
        )


def read_value(config: Mapping[str, Any], key: str, kind: type[Any], default: Any = None) -> Any:
    """A value of a config, which must be of this kind; null is as good as absent.

    Nothing is rounded, and no text is read as a number. Raises `TypeError`, or `KeyError` for a
    value that is absent and has no default.
    """
    value = config.get(key)
    if value is None:
        return config[key] if default is None else default
    if type(value) is not kind and not (kind is float and type(value) is int):
        wanted = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            str: "a text",
            dict: "an object",
        }
        raise TypeError(f"{key} is {shorten(repr(value), 60)} where {wanted[kind]} belongs")
    return kind(value)


def read_fields(config: Mapping[str, Any], name: str) -> ModelConfig:
    """The fields of a config.json; raises whatever a wrong or missing value leads to."""
    number, flag = partial(read_value, config, kind=int), partial(read_value, config, kind=bool)
    num_heads, hidden_size = number("num_attention_heads"), number("hidden_size")
    context = number("max_position_embeddings", default=2048)
    is_drafter = config.get("draft_of") is not None
    return ModelConfig(
        num_layers=number("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=number("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=number("num_key_value_heads", default=num_heads),
        head_dim=number("head_dim", default=hidden_size // max(num_heads, 1)),
        vocab_size=number("vocab_size"),
        context_length=context,
        rope=read_rope(config, context),
        rms_norm_eps=read_value(config, "rms_norm_eps", float, ModelConfig.rms_norm_eps),
        tie_word_embeddings=flag("tie_word_embeddings", default=False),
        attention_bias=flag("attention_bias", default=False),
        bos_token_id=next(iter(as_token_ids(config.get("bos_token_id"))), None),
        eos_token_ids=as_token_ids(config.get("eos_token_id")),
        name=name,
        draft_of=printable(read_value(config, "draft_of", str)) if is_drafter else None,
        head_size=number("head_size") if is_drafter else None,
    )


def read_rope(config: Mapping[str, Any], default_context: int) -> RopeConfig:
    """From a Hugging Face config.json, in its older form (`rope_scaling`) or its newer one."""
    scaling: dict[str, Any] = {}
    for form in ("rope_parameters", "rope_scaling"):
        scaling = read_value(config, form, dict, {}) or scaling
    if {config.get("partial_rotary_factor"), scaling.get("partial_rotary_factor")} - {None, 1}:
        raise InputError(
            "RoPE turns only a part of each head (partial_rotary_factor), which no Llama does; "
            "check it"
        )
    theta = read_value(config, "rope_theta", float, RopeConfig.theta)
    theta = read_value(scaling, "rope_theta", float, theta)
    kind = read_value(scaling, "rope_type", str, read_value(scaling, "type", str, "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if scaling.get("factor") is None:
        raise InputError(
            f"RoPE type {shorten(repr(kind), 60)} has no factor, got {shorten(scaling)}; set it in "
            "config.json"
        )
    if not {scaling.get("mscale"), scaling.get("mscale_all_dim")} <= {None}:
        raise InputError(
            "RoPE scaling uses mscale, which Llama models do not; set attention_factor instead"
        )
    original = read_value(scaling, "original_max_position_embeddings", int, default_context)
    original = read_value(config, "original_max_position_embeddings", int, original)
    numbers = [name for name in _ROPE_NUMBERS if scaling.get(name) is not None]
    options: dict[str, Any] = {name: read_value(scaling, name, float) for name in numbers}
    options["truncate"] = read_value(scaling, "truncate", bool, True)
    return RopeConfig(theta, kind, original_context=original, **options)


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
    theta = config.rope.theta
    base = config.rope.original_context or config.context_length
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


def as_token_ids(value: Any) -> tuple[int, ...]:
    """An `eos_token_id` of a config, which may be absent, one number, or several."""
    tokens = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise InputError(
            f"config has the token id {shorten(repr(value), 60)}, which is no whole number; "
            "correct it"
        )
    return tokens


def printable(text: object, limit: int = 200) -> str:
    """`shorten`, for texts that come from files: a control character could move the cursor."""
    return "".join(char if char.isprintable() else "\ufffd" for char in shorten(text, limit))


@contextmanager
def explain(
    problem: str,
    *errors: type[Exception],
    advice: str = "download it again",
    limit: int = 200,
    with_type: bool = False,
) -> Iterator[None]:
    """Turns any of these errors into `problem (what the error says); advice`."""
    try:
        yield
    except InputError:
        raise
    except errors as error:
        kind = f"{type(error).__name__}: " if with_type else ""
        raise InputError(f"{problem} ({kind}{printable(error, limit)}); {advice}") from None
