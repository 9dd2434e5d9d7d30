"""The policies that the paper compares its own with, as objects of `minitri.Policy`.

- `TopTokens`: the exact scores of every token, as costly as attention itself.
- `HeavyHitters` (H2O): attention that a token has received so far, from every query.
- `LatestTokens` (StreamingLLM): the later, the better.

The importance of a chunk is that of all its tokens; with `chunk_size=1`, as `speculation_with`
sets it, each token stands for itself. All choose from the full cache at every
rebuild. For `LatestTokens` that changes nothing: a token that has left the window never comes back.
`HeavyHitters` is not the published method, which evicts for good, while the prompt is read already,
and then adds up the attention of what is left only. So its figures must not be compared with those
of TriForce's table 1.

Legend: see `minitri/caches/policies.py`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import minitri
from minitri.caches.full import FullCache
from minitri.caches.policies import attention_received

QUERIES_AT_ONCE = 64
"""`HeavyHitters` scores this many queries of a prompt at a time, which bounds its memory."""


def speculation_with(name: str, settings: minitri.SpeculationConfig) -> minitri.SpeculationConfig:
    """These settings with another policy; all but the paper's choose single tokens."""
    own = settings.chunk_size if name == "retrieval" else 1
    return dataclasses.replace(settings, policy=policy_of(name), chunk_size=own)


def policy_of(name: Any) -> Any:
    """What `SpeculationConfig(policy=...)` takes for a name of `NAMES`."""
    return POLICIES[name]() if isinstance(name, str) and name in POLICIES else name


class TopTokens(minitri.Policy):
    """Attention to every single token."""

    def scores(self, layer: int, b: int, q_KRD: Tensor, chunks_KNMD: Tensor) -> Tensor:  # noqa: ARG002
        received_KS = attention_received(q_KRD, chunks_KNMD.flatten(1, 2))
        return received_KS.unflatten(1, chunks_KNMD.shape[1:3]).sum(2)


class LatestTokens(minitri.Policy):
    """Position alone."""

    def scores(self, layer: int, b: int, q_KRD: Tensor, chunks_KNMD: Tensor) -> Tensor:  # noqa: ARG002
        K, N = chunks_KNMD.shape[:2]
        return torch.arange(N, device=q_KRD.device).float().expand(K, N)


class HeavyHitters(minitri.Policy):
    """Accumulated attention. It costs a second attention pass over the prompt."""

    wants_prompt = True

    def __init__(self) -> None:
        self._received: dict[int, Tensor] = {}  # by row, (L, K, S)

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:
        L, _, K, S, D = full.shape
        _, T, H, _ = queries_LTHD.shape
        if b not in self._received:
            self._received[b] = torch.zeros(L, K, S, dtype=torch.float32, device=full.device)
        for layer, (keys_KSD, _) in enumerate(full.layers(b)):
            for first in range(0, T, QUERIES_AT_ONCE):
                last = min(first + QUERIES_AT_ONCE, T)
                seen = end - T + last  # keys up to the last of these queries
                q_TKGD = queries_LTHD[layer, first:last].unflatten(1, (K, H // K))
                q_KRD = (q_TKGD.permute(1, 2, 0, 3) / math.sqrt(D)).reshape(K, -1, D)
                scores_KRS = q_KRD @ keys_KSD[:, :seen].transpose(1, 2)
                scores_KGTS = scores_KRS.float().view(K, H // K, last - first, seen)
                square = (last - first, last - first)
                future = torch.ones(square, dtype=torch.bool, device=full.device).triu_(1)
                scores_KGTS[..., first - last :].masked_fill_(future, -math.inf)
                self._received[b][layer, :, :seen] += scores_KGTS.softmax(-1).sum((1, 2))

    def scores(self, layer: int, b: int, q_KRD: Tensor, chunks_KNMD: Tensor) -> Tensor:  # noqa: ARG002
        _, N, M, _ = chunks_KNMD.shape
        return self._received[b][layer, :, : N * M].unflatten(1, (N, M)).sum(2)

    def reset(self, b: int) -> None:
        self._received.pop(b, None)


POLICIES: dict[str, Callable[[], minitri.Policy]] = {
    "streaming": LatestTokens,
    "topk": TopTokens,
    "h2o": HeavyHitters,
}
NAMES = ("retrieval", *POLICIES)
