"""Families of models, and the tables that say in what their files differ from those of a Llama."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


def as_llama(name: str, tensor: Tensor, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields the parts of a tensor of Hugging Face by the names that a Llama has for them."""
    names = read_table("output_norm") if config.norms_after else {}
    for part_name, part in unfused(
        ".".join(names.get(word, word) for word in name.split(".")), tensor
    ):
        rows = rotary_rows(part_name, config)
        yield part_name, part if rows is None else part[rows]


def unfused(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Yields the matrices, and their names, that a tensor of a checkpoint may have fused. In
    `qkv_proj` q has as many rows as columns, as in Phi-3."""
    stem, _, module = name.removesuffix(".weight").rpartition(".")
    if module not in ("qkv_proj", "gate_up_proj"):
        yield name, tensor
        return
    N, E = tensor.shape
    kv = (N - E) // 2
    sizes = {"q_proj": E, "k_proj": kv, "v_proj": kv}
    if module == "gate_up_proj":
        sizes = {"gate_proj": N // 2, "up_proj": N // 2}
    for part_name, part in zip(sizes, tensor.split([*sizes.values()]), strict=True):
        yield f"{stem}.{part_name}.weight", part


def rotary_rows(name: str, config: ModelConfig) -> Tensor | None:
    """The order of the rows of q or k in which numbers of a head that rotate together, or not at
    all, are D/2 apart; None: as they are, where all rotate."""
    D = config.head_dim
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    num_heads = heads.get(name.removesuffix(".weight").rpartition(".")[2])
    rotating = config.rope.num_rotating(D)
    if num_heads is None or rotating == D:
        return None
    parts = torch.arange(D).split([rotating, D - rotating])
    order_D = torch.cat([part.view(2, -1) for part in parts], 1).flatten()
    return torch.arange(num_heads * D).view(-1, D)[:, order_D].flatten()
