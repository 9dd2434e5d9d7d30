"""A drafter made of some layers of its target.

    engine = minitri.load("smollm2-135m", draft="suffix")
    drafter = SkippedLayers(engine.model, [0, 1, 2, 27, 28, 29])
    engine = minitri.Engine(engine.model, engine.tokenizer, drafter=drafter)

Layer skipping (Draft & Verify, Zhang et al. 2024, arXiv 2309.08168): most layers of a deep network
change its residual stream little, so a few of them guess what all would say. The drafter shares its
target's modules, embeddings and LM head, and has a streaming cache of its own for its layers alone.
Which layers to keep is searched by `tools/paper/find_layers.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minitri.caches.streaming import StreamingCache
from minitri.cpu.kernel_layers import KernelLayers
from minitri.model.block import read_block
from minitri.model.llama import Layers, Llama
from minitri.settings import MAX_GAMMA, SpeculationConfig

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
