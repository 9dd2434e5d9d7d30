"""Config files of Hugging Face: from JSON to a `ModelConfig` and to `SamplingParams`.

A null means the same as an absent key, except that of sliding_window. Dataclasses check values."""

import dataclasses
import math
from typing import Any

from minitri.core.config import ModelConfig, RopeConfig
from minitri.core.errors import InputError, explain, shorten
from minitri.core.log import log
from minitri.core.settings import SamplingParams
from minitri.files.families import FAMILIES, WINDOWS, Settings, family_fields, read_table

_TRAINED = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"  # the share of a head's numbers that rotates
_KEYS = read_table("field")
_ONLY = read_table("config_only")
USUAL = SamplingParams(0.7, top_p=0.9)  # where a model recommends nothing: greedy texts loop
_NO_TOKEN = (-1, 2**32 - 1)  # ids by which files say that there is no such token


def read_config(settings: Settings, name: str) -> ModelConfig:
    """The `ModelConfig` in the settings of a config.json, for a model that is called `name`.
    Raises `InputError` for a model of an unknown family, or wrong values."""
    kind: Any = settings.get("model_type")
    if kind not in list(FAMILIES):  # a file may have any type here
        raise InputError(
            f"{name} is a {shorten(repr(kind), 60)} model; use one of {', '.join(FAMILIES)}"
        )
    with explain(f"the config of {name} holds a wrong value", "get the original"):
        given = read_table("family_default").get(kind, {}) | without_null(settings)
        # Unlike other nulls this one says that there is no window.
        given["sliding_window"] = settings.get("sliding_window", given.get("sliding_window"))
        may_have = kind in WINDOWS or given.get("use_sliding_window") is False
        only = {} if may_have else {"sliding_window": None}
        require(given, _ONLY | only | read_table(f"config_only_{kind}"), name)
        if kind in ("llama", "granite", "olmo2", "phi3"):
            given.setdefault("num_key_value_heads", given.get("num_attention_heads"))
        eos = given.get("eos_token_id", [])  # one or several
        fields = _fields(ModelConfig, given) | {"name": name, "rope": RopeConfig()}
        fields["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else (eos,)
        config = ModelConfig(**{"head_dim": 2, **fields})
        head_dim = fields.get("head_dim", config.hidden_size // config.num_heads)
        ends = tuple(token for token in config.eos_token_ids if token < config.vocab_size)
        if ends != config.eos_token_ids:
            text = "%s: eos_token_id is %s, and there are %d tokens; other ends are left out"
            log.warning(text, name, shorten(eos, 60), config.vocab_size)
        window_rope = None
        if kind == "gemma3_text":
            ropes = given.get("rope_parameters", {})  # newer files: one for each type of layers
            local = {"rope_theta": given["rope_local_base_freq"], "rope_scaling": {}}
            local["rope_parameters"] = ropes.get("sliding_attention", {})
            window_rope = _read_rope(given | local, head_dim, name)
            given["rope_parameters"] = ropes.get("full_attention", ropes)
        length, rope = config.context_length, _read_rope(given, head_dim, name)
        if rope.kind == "yarn":  # some files give the context before it was extended
            length = max(length, int(rope.factor * (rope.original_context or 0)))
        changes = {"head_dim": head_dim, "context_length": length, "eos_token_ids": ends}
        changes |= {"rope": rope, "window_rope": window_rope, **family_fields(kind, given)}
        return dataclasses.replace(config, **changes)


def without_null(settings: Settings) -> dict[str, Any]:
    """The settings of a file or request without those that are null, or ids meaning no token."""
    none = [key for key in settings if key.endswith("_token_id") and settings[key] in _NO_TOKEN]
    return {key: value for key, value in settings.items() if value is not None and key not in none}


def _fields(kind: type[Any], given: Settings) -> dict[str, Any]:
    """Values of a file's settings for fields of the dataclass `kind`, by field name."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: given[key] for name in names if (key := _KEYS.get(name, name)) in given}


def _read_rope(given: Settings, head_dim: int, name: str) -> RopeConfig:
    """The `RopeConfig` in the settings of model `name`'s config.json, in its older or newer form.
    LongRoPE has factors for short and long texts. As cached keys keep their rotation, all texts use
    those for long ones, unless the model's context is not longer than in its pre-training."""
    scaling: dict[str, Any] = {}
    for form in ("rope_parameters", "rope_scaling"):
        settings = given.get(form, {})
        if not isinstance(settings, dict):
            raise TypeError(f"{form} is no object")
        scaling = without_null(settings) or scaling
    get = scaling.get
    share: Any = scaling.setdefault(_SHARE, given.get(_SHARE, 1.0))
    require(scaling, _ONLY, name)
    if given["model_type"] != "phi3":
        require(scaling, {_SHARE: 1.0, "rotary_dim": head_dim}, name)
    if share != 1:
        scaling["rotary_dim"] = int(head_dim * share)
    theta: Any = scaling.setdefault("rope_theta", given.get("rope_theta", RopeConfig.theta))
    kind = get("rope_type", get("type"))
    if "long_factor" in scaling:
        kind = "longrope"
    if kind in (None, "default", "none"):
        return RopeConfig(theta, rotary_dim=get("rotary_dim"))
    context = given["max_position_embeddings"]
    trained = given.get(_TRAINED, get(_TRAINED, context))
    fields = _fields(RopeConfig, scaling) | {"kind": kind, "original_context": trained}
    if kind != "longrope":
        return RopeConfig(**fields | {"factor": scaling["factor"]})
    factor = max(context / trained, 1.0)
    scale = math.sqrt(1 + math.log(max(get("factor", factor), 1.0), trained))
    fields = {"attention_factor": scale, **fields, "factor": factor}
    fields["frequency_divisors"] = tuple(scaling["long_factor" if factor > 1 else "short_factor"])
    return RopeConfig(**fields)


def require(settings: Settings, supported: Settings, name: str) -> None:
    """Raises `InputError` about model `name` if a setting is there and not as in `supported`."""
    for key, wanted in supported.items():
        value = settings.get(key)
        is_alike = isinstance(value, bool) == isinstance(wanted, bool)
        if value is not None and not (is_alike and value == wanted):
            got = f"{name} has {key}={shorten(repr(value), 160)}, which minitri does not run"
            raise InputError(f"{got}; use a model with {key}={shorten(wanted, 60)}")


def read_sampling(settings: Settings, name: str) -> SamplingParams:
    """The sampling that the generation_config.json of model `name` recommends: greedy if
    `do_sample` is false. Settings that it lacks are neutral if that is true, else as in `USUAL`
    (temperature 0.7, top-p 0.9). If any is wrong or unsupported, warns and returns `USUAL`."""
    given = without_null(settings)
    samples = given.get("do_sample")
    base = SamplingParams(1.0) if samples is True else USUAL
    fields = vars(base) | _fields(SamplingParams, given)
    if samples is False:
        fields["temperature"] = 0.0
    try:
        require(given, read_table("sampling_only") | {"do_sample": samples is True}, name)
        return SamplingParams(**fields)
    except InputError as error:
        log.warning("%s: generation_config.json is not followed: %s", name, error)
    return USUAL
