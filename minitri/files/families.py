"""Families of models, and the tables that say in what their files differ from those of a Llama."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minitri.core.config import ModelConfig

_TABLES = Path(__file__).with_name("tables.txt").read_text("utf-8")
_ROWS = re.findall(r"^(\w+) +(\S+) +(.+)", _TABLES, re.MULTILINE)


def read_table(name: str) -> dict[str, Any]:
    """Values by keys, in order, of a table in tables.txt."""
    return {key: json.loads(value) for kind, key, value in _ROWS if kind == name}


FAMILIES = read_table("family")


def family_fields(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `ModelConfig` that a family sets by itself. Wrong settings raise any error."""
    fields = FAMILIES[kind] | {"unrotated_layers": ()}
    if kind == "smollm3":
        layers = range(given["num_hidden_layers"])[:1000]  # more are refused later
        every = given.get("no_rope_layer_interval", 4)
        rotates = given.get("no_rope_layers", [(layer + 1) % every for layer in layers])
        fields["unrotated_layers"] = tuple(layer for layer in layers if not rotates[layer])
    return fields


def as_llama(name: str, config: ModelConfig) -> str:
    """The name that a Llama has for a tensor of Hugging Face."""
    names = read_table("output_norm") if config.norms_after else {}
    return ".".join(names.get(part, part) for part in name.split("."))
