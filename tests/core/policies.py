"""A policy as a user would write it: by what the queries of the whole text paid attention to."""

import math
from typing import Any

import torch
from torch import Tensor

from minitri.core.caches.full import FullCache
from minitri.core.caches.policies import Policy


class ReceivedAttention(Policy):
    """Attention that each token got from all queries so far, its own included."""

    wants_prompt = True

    def __init__(self) -> None:
        self._received: dict[tuple[int, int], Tensor] = {}

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:
        T, _, D = queries_LTHD.shape[1:]
        for layer, (keys_KSD, _) in enumerate(full.layers(b)):
            places = torch.arange(end, device=keys_KSD.device)
            q_KGTD = queries_LTHD[layer].unflatten(1, (len(keys_KSD), -1)).permute(1, 2, 0, 3)
            scores_KGTS = (q_KGTD @ keys_KSD[:, None, :end].mT / math.sqrt(D)).float()
            is_future_TS = places > places[end - T :, None]
            received_KS = scores_KGTS.masked_fill(is_future_TS, -math.inf).softmax(-1).sum((1, 2))
            if (before := self._received.get((b, layer))) is not None:
                num = min(before.shape[1], end)
                received_KS[:, :num] += before[:, :num]
            self._received[b, layer] = received_KS

    def scores(self, layer: int, b: int, q_KRD: Tensor, chunks_KNMD: Tensor) -> Tensor:
        K, N, M = chunks_KNMD.shape[:3]
        received_KS = self._received[b, layer][:, : N * M]
        scores_KS = received_KS.new_full((K, N * M), -math.inf)
        scores_KS[:, : received_KS.shape[1]] = received_KS
        return scores_KS.unflatten(1, (N, M)).sum(2)

    def reset(self, b: int) -> None:
        self._received = {key: value for key, value in self._received.items() if key[0] != b}


def policy_of(name: Any) -> Any:
    """What `SpeculationConfig(policy=...)` takes: a new object if it is called "received"."""
    return ReceivedAttention() if name == "received" else name
