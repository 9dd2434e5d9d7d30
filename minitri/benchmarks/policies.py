"""Policies that exist to be compared with the default: `--policy topk | h2o | streaming`.

- `TopTokens`: the exact scores of every token, as costly as attention itself.
- `HeavyHitters` (H2O): attention that a token has received so far, from every query.
- `LatestTokens` (StreamingLLM): the later, the better.

All choose from the full cache at every rebuild. For `LatestTokens` that changes nothing: a token
that has left the window never comes back. `HeavyHitters` is not the published method, which evicts
for good, while the prompt is read already, and then adds up the attention of what is left only. So
its figures must not be compared with those of TriForce's table 1.

Legend: see `caches/policies.py`.
"""

import math

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.caches.policies import attention_received

QUERIES_AT_ONCE = 64
"""`HeavyHitters` scores this many queries of a prompt at a time, which bounds its memory."""


class TopTokens:
    """Attention to every single token."""

    unit = 1
    wants_prompt = False

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:
        """Nothing to learn."""

    def scores(self, layer: int, b: int, q_KRD: Tensor, keys_KSD: Tensor) -> Tensor:  # noqa: ARG002
        return attention_received(q_KRD, keys_KSD)

    def reset(self, b: int) -> None:
        """Nothing to drop."""


class LatestTokens(TopTokens):
    """Position alone."""

    def scores(self, layer: int, b: int, q_KRD: Tensor, keys_KSD: Tensor) -> Tensor:  # noqa: ARG002
        K, S, _ = keys_KSD.shape
        return torch.arange(S, device=q_KRD.device).float().expand(K, S)


class HeavyHitters:
    """Accumulated attention. It costs a second attention pass over the prompt."""

    unit = 1
    wants_prompt = True

    def __init__(self, full: FullCache) -> None:
        L, B, K, S, _ = full.shape
        self._received = torch.zeros(L, B, K, S, dtype=torch.float32, device=full.device)

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:
        _, T, H, D = queries_LTHD.shape
        for layer, (keys_KSD, _) in enumerate(full.layers(b)):
            K = keys_KSD.shape[0]
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
                self._received[layer, b, :, :seen] += scores_KGTS.softmax(-1).sum((1, 2))

    def scores(self, layer: int, b: int, q_KRD: Tensor, keys_KSD: Tensor) -> Tensor:  # noqa: ARG002
        return self._received[layer, b, :, : keys_KSD.shape[1]]

    def reset(self, b: int) -> None:
        self._received[:, b].zero_()
