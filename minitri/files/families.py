"""Families of models, and the tables that say in what their files differ from those of a Llama."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitri.core.config import ModelConfig
from minitri.core.errors import shorten

if TYPE_CHECKING:
    from torch import Tensor

Settings = Mapping[str, Any]  # settings in a file, by name
NamedTensors = Iterator[tuple[str, "Tensor"]]  # a checkpoint's tensors with their names
_TABLES = Path(__file__).with_name("tables.txt").read_text("utf-8")
_ROWS = re.findall(r"^(\w+) +(\S+) +(.+)", _TABLES, re.MULTILINE)


def read_table(name: str) -> dict[str, Any]:
    """Reads the table `name` in tables.txt: its values, parsed as JSON, by their keys, in order."""
    return {key: json.loads(value) for kind, key, value in _ROWS if kind == name}


FAMILIES = read_table("family")
WINDOWS = read_table("window")
TYPES = ("full_attention", "sliding_attention")


def family_fields(kind: str, given: Settings) -> dict[str, Any]:
    """Fields of `ModelConfig`, by name, for a model of the family `kind`, by a file's settings
    `given`. Raises any error."""
    layers = range(given["num_hidden_layers"])
    fields = FAMILIES[kind] | {"sliding_layers": _sliding_layers(kind, given, layers)}
    if kind == "smollm3":
        every = given.get("no_rope_layer_interval", 4)
        rotates = given.get("no_rope_layers", [(layer + 1) % every for layer in layers])
        fields["unrotated_layers"] = tuple(layer for layer in layers if not rotates[layer])
    if kind == "gemma3_text":
        fields["embedding_scale"] = given["hidden_size"] ** 0.5
        fields["score_scale"] = given["query_pre_attn_scalar"] ** -0.5
    return fields


def _sliding_layers(kind: str, given: Settings, layers: range) -> tuple[int, ...]:
    """Numbers of the `layers` with a sliding window, by settings `given` for a family `kind`:
    `layer_types`, or else from `max_window_layers` on all but each `sliding_window_pattern`-th."""
    options = WINDOWS.get(kind, {"use_sliding_window": False})
    options = {key: given.get(key, default) for key, default in options.items()}
    is_on = given["sliding_window"] is not None and options.get("use_sliding_window", True)
    first = options.get("max_window_layers", 0)
    every = options.get("sliding_window_pattern", len(layers) + 1)
    wanted = [TYPES[is_on and i >= first and (i + 1) % every != 0] for i in layers]
    types = given.get("layer_types", wanted)
    is_free = is_on and "layer_types" in options and len(types) == len(layers)
    if types != wanted and not (is_free and {*types} <= {*TYPES}):
        raise ValueError(f"layer_types is {shorten(types, 200)}, not {shorten(wanted, 200)}")
    return tuple(i for i in layers if types[i] == TYPES[True])


def as_llama(name: str, tensor: "Tensor", config: ModelConfig) -> NamedTensors:
    """Yields (name, tensor) for the parts of a Hugging Face tensor, with the names and the order of
    rows of a Llama."""
    names = read_table("output_norm") if config.norms_after else {}
    name = ".".join(names.get(word, word) for word in name.split("."))
    rows = rotary_rows(name, tensor.shape, config)
    if config.wide_norms and "norm" in name:  # weights are stored less 1
        tensor = tensor.float() + 1
    yield from unfused(name, tensor if rows is None else tensor[rows], config)


def unfused(name: str, tensor: "Tensor", config: ModelConfig) -> NamedTensors:
    """Yields (name, view) of the parts of a fused tensor: q, k and v, or gate and up. A tensor that
    is not fused, or has another number of rows, is yielded as it is."""
    module = f".{name}".split(".")[-2]
    kv = config.num_kv_heads * config.head_dim
    fused = {
        "qkv_proj": {"q_proj": config.num_heads * config.head_dim, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
    }
    sizes = fused.get(module, {})
    if tensor.shape[:1] != (sum(sizes.values()),):
        yield name, tensor
        return
    for part, rows in zip(sizes, tensor.split([*sizes.values()]), strict=True):
        yield name.replace(module, part), rows


def rotary_rows(
    name: str, shape: tuple[int, ...], config: ModelConfig, is_paired: bool = False
) -> "Tensor | None":
    """Numbers (rows,) of a tensor's rows in the order that RoPE here expects; None: as stored. In q
    and k, by `name`, rows that rotate together get D/2 apart in a head. A file has them next to
    each other if `is_paired`, else half of the rotating part apart; unrotated ones come last."""
    from torch import arange, cat  # only here: flags read `FAMILIES` before PyTorch is imported

    D = config.head_dim
    rotating = config.rope.rotary_dim or D
    num_values = {"q_proj": 0, "k_proj": 0, "qkv_proj": config.num_kv_heads}
    *_, module, kind = f".{name}".split(".")
    if kind not in ("weight", "bias") or module not in num_values:
        return None
    if rotating == D and not is_paired:
        return None
    halves = [
        part.view(-1, 2).T if is_paired else part.view(2, -1)
        for part in arange(D).split([rotating, D - rotating])
    ]
    order_D = cat(halves, 1).flatten()
    rows = arange(shape[0]).view(-1, D)
    heads = rows[: len(rows) - num_values[module]]
    heads.copy_(heads[:, order_D])
    return rows.flatten()
