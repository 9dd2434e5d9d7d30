"""A drafter made of some layers of its target: which they are, in a file, and what asks them.

    engine = minitri.load("smollm2-135m", draft="suffix")
    drafter = SkippedLayers(engine.model, [0, 1, 2, 27, 28, 29])
    engine = minitri.Engine(engine.model, engine.tokenizer, drafter=drafter)

Layer skipping (Draft & Verify, Zhang et al. 2024, arXiv 2309.08168): most layers of a deep network
change its residual stream little, so a few of them guess what all would say. The drafter shares its
target's modules, embeddings and LM head, and has a streaming cache of its own for its layers alone.
Which layers to keep is searched by `tools/paper/find_layers.py`. The file is JSON and holds their
numbers and those of the target, so that another model refuses it.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minitri.caches.streaming import StreamingCache
from minitri.config import ModelConfig
from minitri.cpu.kernel_layers import KernelLayers
from minitri.errors import InputError, shorten
from minitri.loading.tokenizer import Tokenizer
from minitri.model.block import read_block
from minitri.model.llama import Layers, Llama
from minitri.settings import MAX_GAMMA, SpeculationConfig
from tools.paper.baselines.datastore import fingerprint

FORMAT = "minitri layers 1"
ADVICE = "make it again with tools.paper.find_layers"
SETTINGS = SpeculationConfig("naive", gamma1=MAX_GAMMA)
"""By which the window of the drafter's cache is made."""


class SkippedLayers:
    """Some layers of a model: a `minitri.Drafter`."""

    def __init__(self, model: Llama, layers: Sequence[int]) -> None:
        self._model = with_layers(model, layers)
        self._rows: dict[int, tuple[list[int], StreamingCache]] = {}
        """What each row's cache has read."""

    def guess(self, tokens: list[int], row: int) -> Tensor:
        """The distribution (V,) of these layers after sinks and a window of latest tokens."""
        model, (known, cache) = self._model, self._rows.get(row) or ([], self._new_cache())
        pairs = zip(known, tokens[:-1], strict=False)
        num_same = [*(a == b for a, b in pairs), False].index(False)
        if max(len(known), len(tokens)) - num_same > SETTINGS.max_block:
            self._read_window(tokens[:-1], cache)
        else:
            cache.crop([num_same])
        cache.slide()
        block = tokens[cache.num_tokens[0] :]
        hidden_1TE = read_block(model, [block], cache)
        cache.advance([len(block)])
        self._rows[row] = list(tokens), cache
        return model.logits(hidden_1TE[0, -1]).softmax(0)

    def _read_window(self, tokens: list[int], cache: StreamingCache) -> None:
        sinks = SETTINGS.num_sink_tokens
        window = tokens[:sinks] + tokens[sinks:][-SETTINGS.num_recent_tokens :]
        cache.reset(0)
        read_block(self._model, [window], cache.row(0))
        cache.hold(0, len(window), len(tokens))

    def _new_cache(self) -> StreamingCache:
        model = self._model
        where: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
        return StreamingCache(model.config, model.rope, 1, SETTINGS, **where)


def with_layers(model: Llama, layers: Sequence[int]) -> Llama:
    """The model without its other layers; it shares everything and has no weights of its own."""
    name = f"{len(layers)} layers of {model.config.name}"
    config = dataclasses.replace(model.config, num_layers=len(layers), name=name)
    nowhere = torch.device("meta")
    view = Llama(config, dtype=model.dtype, device=nowhere, target=model, attend=model.attend)
    view.layers = Layers(model.layers[number] for number in layers)
    if isinstance(model.layers, KernelLayers):
        view.layers = KernelLayers(view.layers, model.layers.kernels)
    view.norm, view.lm_head, view.rope = model.norm, model.lm_head, model.rope
    return view


def write_layers(
    path: Path, layers: Sequence[int], config: ModelConfig, tokenizer: Tokenizer
) -> None:
    """Writes down which layers of a model to keep. Raises `InputError`."""
    try:
        path.write_text(json.dumps({**_facts(config, tokenizer), "layers": list(layers)}) + "\n")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = shorten(error, 90)
        raise InputError(
            f"cannot write {path} ({reason}); name a file in a folder with room"
        ) from None


def read_layers(path: Path, config: ModelConfig, tokenizer: Tokenizer) -> list[int]:
    """The layers that a file says to keep of this very model. Raises `InputError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = shorten(getattr(error, "strerror", None) or error, 90)
        raise InputError(f"the layers in {path} cannot be read ({reason}); {ADVICE}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{path} is no file of layers; {ADVICE}")
    for name, value in _facts(config, tokenizer).items():
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


def _facts(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a file says about the model it is of."""
    sizes = {"num_layers": config.num_layers, "hidden_size": config.hidden_size}
    return {"format": FORMAT, **sizes, "vocabulary": fingerprint(tokenizer)}


def _is_subset(layers: Any, num_layers: int) -> bool:
    """Whether these are numbers of layers, each larger than the one before."""
    return (
        isinstance(layers, list)
        and len(layers) > 0
        and all(type(number) is int and 0 <= number < num_layers for number in layers)
        and layers == sorted(set(layers))
    )
