"""A drafter made of some layers of its target.

    engine = minitri.load("smollm2-135m", draft="suffix")
    layers = least_missed(engine.model, engine.tokenizer.encode(text), 0.68)
    engine = minitri.Engine(engine.model, engine.tokenizer, with_layers(engine.model, layers))

Layer skipping (Draft & Verify, Zhang et al. 2024, arXiv 2309.08168): most layers of a deep network
change its residual stream little, so some of them guess what all would say. The drafter shares its
target's modules, embeddings and LM head; its streaming cache has its own layers alone.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch

from minitri.core.caches.full import FullCache
from minitri.core.errors import InputError
from minitri.core.model.block import read_block
from minitri.core.model.llama import Layers, Llama
from minitri.devices.cpu.kernel_layers import KernelLayers

NUM_WINDOWS, WINDOW, NUM_SCORED = 4, 128, 64
"""Tokens read of a text to choose layers, and how many of its last tokens are scored."""


def with_layers(model: Llama, layers: Sequence[int]) -> Llama:
    """The model without its other layers; it shares everything and has no weights of its own."""
    name = f"{len(layers)} layers of {model.config.name}"
    config = dataclasses.replace(model.config, num_layers=len(layers), name=name)
    nowhere = torch.device("meta")
    view = Llama(config, dtype=model.dtype, device=nowhere, target=model, attend=model.attend)
    view.layers = Layers(model.layers[number] for number in layers)
    if isinstance(model.layers, KernelLayers):
        view.layers = KernelLayers(view.layers, model.layers.kernels)
    view.norm, view.lm_head = model.norm, model.lm_head
    view.rope, view.window_rope = model.rope, model.window_rope
    return view


@torch.inference_mode()
def least_missed(model: Llama, ids: list[int], share: float) -> list[int]:
    """Layers that guess well what all of them say: from all, the one without which the others'
    distributions overlap most with those of all, at T = 0.6 after tokens of some windows of a text,
    is removed until this share is left. Raises `InputError`."""
    num_windows = min(NUM_WINDOWS, len(ids) // WINDOW)
    if not num_windows:
        raise InputError(f"a text has {len(ids)} tokens; give texts of {WINDOW} or more")
    stride = len(ids) // num_windows
    windows = [ids[n * stride :][:WINDOW] for n in range(num_windows)]

    def probs(layers: Sequence[int]) -> torch.Tensor:
        view = with_layers(model, layers)
        cache = FullCache.allocate(view, num_windows, WINDOW)
        hidden_BTE = read_block(view, windows, cache)[:, -NUM_SCORED:]
        return (view.logits(hidden_BTE.flatten(0, 1)) / 0.6).softmax(1)

    kept = [*range(model.config.num_layers)]
    all_NV, overlaps = probs(kept), [math.inf] * len(kept)
    while len(kept) > max(1, round(share * model.config.num_layers)):
        # What was scored with more layers around is hardly less than what it would score now.
        scored: set[int] = set()
        while (layer := max(kept, key=overlaps.__getitem__)) not in scored:
            others = [other for other in kept if other != layer]
            overlaps[layer] = float(torch.minimum(probs(others), all_NV).sum())
            scored.add(layer)
        kept.remove(layer)
    return kept
