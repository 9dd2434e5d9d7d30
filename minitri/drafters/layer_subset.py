"""A drafter made of some layers of its target: which they are, in a file, and the view of them.

Layer skipping (Draft & Verify, Zhang et al. 2024, arXiv 2309.08168): most layers of a deep network
change its residual stream little, so a few of them guess what all would say. The drafter shares its
target's modules, embeddings and LM head, and has a streaming cache of its own for its layers alone.
Which layers to keep is searched by `tools/find_layers.py`. The file is JSON and holds their numbers
and those of the target, so that another model refuses it.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minitri.config import ModelConfig
from minitri.cpu.kernel_layers import KernelLayers
from minitri.errors import InputError, shorten
from minitri.model.llama import Layers, Llama
from minitri.model.replace import replace_modules

FORMAT = "minitri layers 1"
ADVICE = "make it again with tools/find_layers.py"


def with_layers(model: Llama, layers: Sequence[int]) -> Llama:
    """The model without its other layers; it shares everything and has no weights of its own."""
    view: Llama = replace_modules(model, {})
    whole, kept = model.layers, [view.layers[number] for number in layers]
    if isinstance(whole, KernelLayers):
        view.layers = KernelLayers(Layers(kept), whole.kernels)
    else:
        view.layers = type(whole)(kept)
    name = f"{len(layers)} layers of {model.config.name}"
    view.config = dataclasses.replace(model.config, num_layers=len(layers), name=name)
    view.num_bytes = 0
    return view


def write_layers(path: Path, layers: Sequence[int], config: ModelConfig, vocabulary: str) -> None:
    """Writes down which layers of a model to keep. Raises `InputError`.

    `vocabulary` is the fingerprint of the model's tokenizer.
    """
    try:
        path.write_text(json.dumps({**_facts(config, vocabulary), "layers": list(layers)}) + "\n")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = shorten(error, 90)
        raise InputError(
            f"cannot write {path} ({reason}); name a file in a folder with room"
        ) from None


def read_layers(path: Path, config: ModelConfig, vocabulary: str) -> list[int]:
    """The layers that a file says to keep of this very model. Raises `InputError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = shorten(getattr(error, "strerror", None) or error, 90)
        raise InputError(f"the layers in {path} cannot be read ({reason}); {ADVICE}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{path} is no file of layers; {ADVICE}")
    for name, value in _facts(config, vocabulary).items():
        if content.get(name) != value:
            what = "vocabulary" if name == "vocabulary" else f"{name} {shorten(content.get(name))}"
            raise InputError(
                f"{path} is of another model than {config.name}, by its {what}; {ADVICE}"
            )
    layers: Any = content.get("layers")
    if not _is_subset(layers, config.num_layers):
        given = shorten(repr(layers), 60)
        raise InputError(
            f"{path} has the layers {given}; they must be numbers from 0 to "
            f"{config.num_layers - 1}, at least one, in order; {ADVICE}"
        )
    return list(layers)


def _facts(config: ModelConfig, vocabulary: str) -> dict[str, Any]:
    """What a file says about the model it is of."""
    sizes = {"num_layers": config.num_layers, "hidden_size": config.hidden_size}
    return {"format": FORMAT, **sizes, "vocabulary": vocabulary}


def _is_subset(layers: Any, num_layers: int) -> bool:
    """Whether these are numbers of layers, each larger than the one before."""
    return (
        isinstance(layers, list)
        and len(layers) > 0
        and all(type(number) is int and 0 <= number < num_layers for number in layers)
        and layers == sorted(set(layers))
    )
