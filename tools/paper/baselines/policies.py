"""The policies that the paper compares its own with, as objects of `minitri.Policy`.

The importance of a chunk is that of all its tokens; with `chunk_size=1`, as `speculation_with`
sets it, each token stands for itself.

Legend: see `minitri/core/caches/policies.py`; P tokens that are kept of a text, by KV head.
"""

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

import minitri
from minitri.core.caches.full import FullCache
from minitri.core.caches.policies import attention_received
from minitri.core.model.attention import block_mask

QUERIES_AT_ONCE = 64
"""`HeavyHitters` reads this many tokens of a prompt between two evictions; it bounds its memory."""


def speculation_with(name: str, settings: minitri.SpeculationConfig) -> minitri.SpeculationConfig:
    """These settings with another policy; all but the paper's choose single tokens, and H2O evicts
    all beyond the budget."""
    if name == "retrieval":
        return dataclasses.replace(settings, policy=name)
    policy = HeavyHitters(settings.budget) if name == "h2o" else POLICIES[name]()
    return dataclasses.replace(settings, policy=policy, chunk_size=1)


class TopTokens(minitri.Policy):
    """Attention to every single token, as costly as attention itself."""

    def scores(self, layer: int, b: int, q_KRD: Tensor, chunks_KNMD: Tensor) -> Tensor:  # noqa: ARG002
        received_KS = attention_received(q_KRD, chunks_KNMD.flatten(1, 2))
        return received_KS.unflatten(1, chunks_KNMD.shape[1:3]).sum(2)


class LatestTokens(minitri.Policy):
    """StreamingLLM: the later, the better; so what has left the window is gone, too."""

    def scores(self, layer: int, b: int, q_KRD: Tensor, chunks_KNMD: Tensor) -> Tensor:  # noqa: ARG002
        K, N = chunks_KNMD.shape[:2]
        return torch.arange(N, device=q_KRD.device).float().expand(K, N)


class Hitters(NamedTuple):
    """Tokens (K, P) that a layer keeps of a text, in their order, and the attention they got."""

    places_KP: Tensor
    received_KP: Tensor


class HeavyHitters(minitri.Policy):
    """Attention received so far from every query, by a second attention pass over the prompt.

    With a budget it is H2O: half of it are the latest tokens, half those that received most; others
    are evicted for good, and later queries attend to the rest alone. That happens not after every
    token but after every `QUERIES_AT_ONCE`, while the prompt is read already.
    """

    wants_prompt = True

    def __init__(self, budget: int | None = None) -> None:
        self._budget = budget
        self._rows: dict[int, dict[int, Hitters]] = {}
        """Kept tokens by row and layer."""

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:
        row = self._rows.setdefault(b, {})
        T = queries_LTHD.shape[1]
        for layer, (keys_KSD, _) in enumerate(full.layers(b)):
            for first in range(0, T, QUERIES_AT_ONCE):
                block_THD = queries_LTHD[layer, first : first + QUERIES_AT_ONCE]
                row[layer] = self._read(row.get(layer), block_THD, end - T + first, keys_KSD)

    def _read(
        self, old: Hitters | None, queries_THD: Tensor, start: int, keys_KSD: Tensor
    ) -> Hitters:
        """Tokens that are kept after reading those from `start` on, which have these queries."""
        T, _, D = queries_THD.shape
        K = len(keys_KSD)
        device = keys_KSD.device
        places_KP = torch.arange(start, start + T, device=device).expand(K, T)
        if old is not None:
            places_KP = torch.cat((old.places_KP, places_KP), 1)
        P = places_KP.shape[1]
        heads_K1 = torch.arange(K, device=device).unsqueeze(1)
        keys_KPD = keys_KSD[heads_K1, places_KP]  # faster than `gather`
        q_HTD = queries_THD.transpose(0, 1) / math.sqrt(D)
        q_KRD = q_HTD.unflatten(0, (K, -1)).flatten(1, 2)
        scores_KRP = (q_KRD @ keys_KPD.transpose(1, 2)).float()
        future_TT = ~block_mask(T, None, device)
        scores_KRP.unflatten(1, (-1, T))[..., -T:].masked_fill_(future_TT, -math.inf)
        received_KP = scores_KRP.softmax(-1).sum(1)
        if old is not None:
            received_KP[:, :-T] += old.received_KP
        if self._budget is None or self._budget >= P:
            return Hitters(places_KP, received_KP)
        worth_KP = received_KP.clone()
        worth_KP[:, P - self._budget // 2 :] = math.inf
        kept_KP = worth_KP.topk(self._budget).indices.sort().values
        return Hitters(places_KP.gather(1, kept_KP), received_KP.gather(1, kept_KP))

    def scores(self, layer: int, b: int, q_KRD: Tensor, chunks_KNMD: Tensor) -> Tensor:
        K, N, M, _ = chunks_KNMD.shape
        places_KP, received_KP = self._rows[b][layer]
        longest = max(N * M, int(places_KP.max()) + 1)
        scores_KS = torch.full((K, longest), -math.inf, device=q_KRD.device)
        scores_KS.scatter_(1, places_KP, received_KP)
        return scores_KS[:, : N * M].unflatten(1, (N, M)).sum(2)

    def reset(self, b: int) -> None:
        self._rows.pop(b, None)


POLICIES = {"streaming": LatestTokens, "topk": TopTokens, "h2o": HeavyHitters}
