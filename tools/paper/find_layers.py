"""Finds layers of a model that guess well what all of them say (`baselines/skipped_layers.py`).

Layer skipping, or self-speculation (Draft & Verify, arXiv 2309.08168). Windows of a text, drawn at
random, are read by all layers and by those that are kept; the score of a choice is the mean overlap
sum(min(p, q)) of the two distributions after their last tokens, the chance that a guess is
accepted. Layers are removed one by one, each time the one that is missed least.
"""

import random

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.errors import InputError
from minitri.model.block import read_block
from minitri.model.llama import Llama
from tools.paper.baselines.skipped_layers import with_layers

WINDOW, NUM_SCORED = 128, 64
"""Tokens of a window, and how many of its last ones are scored."""


class Scorer:
    """How well some layers of a model guess what all say after windows of a text."""

    def __init__(self, model: Llama, windows: list[list[int]], temperature: float) -> None:
        self.num_layers = model.config.num_layers
        self._model, self._windows, self._temperature = model, windows, temperature
        self._all_NV = self._probs([*range(self.num_layers)])

    @torch.inference_mode()
    def score(self, layers: list[int]) -> float:
        """The mean chance that a guess of these layers is accepted."""
        return float(torch.minimum(self._probs(layers), self._all_NV).sum(1).mean())

    @torch.inference_mode()
    def _probs(self, layers: list[int]) -> Tensor:
        """The distributions (N, V) after the last tokens of all windows."""
        view = with_layers(self._model, layers)
        cache = FullCache.allocate(
            view.config, len(self._windows), WINDOW, dtype=view.dtype, device=view.device
        )
        hidden_BTE = read_block(view, self._windows, cache)[:, -NUM_SCORED:]
        return (view.logits(hidden_BTE.flatten(0, 1)) / self._temperature).softmax(1)


def search(scorer: Scorer, num_kept: int) -> list[int]:
    """The layers to keep."""
    kept, missed_least = [*range(scorer.num_layers)], [1.0] * scorer.num_layers
    while len(kept) > num_kept:
        # What a layer scored with more layers around it is hardly less than what it scores now.
        scored: set[int] = set()
        while (layer := max(kept, key=missed_least.__getitem__)) not in scored:
            missed_least[layer] = scorer.score([other for other in kept if other != layer])
            scored.add(layer)
        kept.remove(layer)
    return kept


def draw_windows(ids: list[int], count: int) -> list[list[int]]:
    """Windows of a text from random places, always the same ones. Raises `InputError`."""
    if len(ids) < WINDOW:
        raise InputError(f"a text has {len(ids)} tokens; give texts of {WINDOW} or more")
    rng = random.Random(0)
    starts = (rng.randrange(len(ids) - WINDOW + 1) for _ in range(count))
    return [ids[start : start + WINDOW] for start in starts]
