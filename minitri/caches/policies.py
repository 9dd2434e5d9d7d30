"""Which of the target's tokens the middle cache holds: one rule per class, compared in the paper's section 5.

A policy scores units of the full cache, chunks or single tokens, for the queries of the latest tokens; the best fill
the budget. Sinks and the latest tokens are kept whatever their score: that is the cache's business, not the policy's.

- `ChunkRetrieval` (TriForce, section 4.1): the mean key of each chunk stands for its tokens, and brings the next chunk
  along.
- `TopTokens`: the exact scores of every token, as costly as attention itself; the oracle.
- `HeavyHitters` (H2O): attention that a token has received so far, from every query.
- `LatestTokens` (StreamingLLM): the later, the better.

With grouped-query attention the G query heads of a KV head share its slots, so their attention is added up, and so is
that of the tokens in the observation window: what the last token looks for is not all that the next ones will.

Legend: L layers, B batch, S slots, K KV heads, G query heads per KV head, H = K G, D head dim, N units, M unit size,
R = G times latest tokens.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from minitri.caches.full import FullCache

QUERIES_AT_ONCE = 64
"""`HeavyHitters` scores this many queries of a prompt at a time, which bounds its scratch memory."""

TOKENS_AT_ONCE = 4096
"""`ChunkRetrieval` makes means of about so many tokens at a time, whose keys may have to come from host memory."""

NEIGHBOR = 0.99
"""Share of a chunk's score that the next chunk gets at least. Just below 1, so that the two are never tied."""


class Policy(Protocol):
    """A rule for what to keep."""

    unit: int
    """Tokens that are kept or dropped together, M."""
    wants_prompt: bool
    """Whether `observe` must see every query of the prompt."""

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:
        """Learns that row b's sequence now reaches to `end`; the queries are those of its last T tokens."""
        ...

    def scores(self, layer: int, b: int, q_KRD: Tensor, keys_KSD: Tensor) -> Tensor:
        """Importance (K, N) to the latest queries of the N = S // M whole units of one layer's keys."""
        ...

    def forget(self) -> None:
        """Forgets all that it has observed."""
        ...


def make_policy(name: str, full: FullCache, chunk_size: int) -> Policy:
    """The policy of a name in `settings.POLICIES`, for the rows of a full cache."""
    if name == "retrieval":
        return ChunkRetrieval(full, chunk_size)
    if name == "topk":
        return TopTokens()
    if name == "h2o":
        return HeavyHitters(full)
    assert name == "streaming"
    return LatestTokens()


class ChunkRetrieval:
    """Attention to the mean key of each chunk. Means are made once, when a chunk is whole.

    A chunk counts nearly as much as the one before it, at least: what the query looks for often begins in one and ends
    in the next, which the query does not look for yet but the queries after it will. In the needle test a number that
    lay across a border was lost without this.
    """

    wants_prompt = False

    def __init__(self, full: FullCache, chunk_size: int) -> None:
        L, B, K, S, D = full.shape
        self.unit = chunk_size
        self._means = torch.empty(L, B, K, S // chunk_size, D, dtype=full.dtype, device=full.device)
        self._num_means = [0] * B

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:  # noqa: ARG002 (means need keys alone)
        M, whole = self.unit, end // self.unit
        while (done := self._num_means[b]) < whole:
            upto = self._num_means[b] = min(whole, done + -(-TOKENS_AT_ONCE // M))
            keys_LKTD, _ = full.tokens(b, done * M, upto * M)
            self._means[:, b, :, done:upto] = keys_LKTD.unflatten(2, (upto - done, M)).mean(3)

    def scores(self, layer: int, b: int, q_KRD: Tensor, keys_KSD: Tensor) -> Tensor:
        scores_KN = attention_received(
            q_KRD, self._means[layer, b, :, : keys_KSD.shape[1] // self.unit]
        )
        scores_KN[:, 1:] = torch.maximum(scores_KN[:, 1:], NEIGHBOR * scores_KN[:, :-1])
        return scores_KN

    def forget(self) -> None:
        self._num_means = [0] * len(self._num_means)


class TopTokens:
    """Attention to every single token."""

    unit = 1
    wants_prompt = False

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:
        pass

    def scores(self, layer: int, b: int, q_KRD: Tensor, keys_KSD: Tensor) -> Tensor:  # noqa: ARG002 (the keys say it all)
        return attention_received(q_KRD, keys_KSD)

    def forget(self) -> None:
        pass


class LatestTokens:
    """Position."""

    unit = 1
    wants_prompt = False

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:
        pass

    def scores(self, layer: int, b: int, q_KRD: Tensor, keys_KSD: Tensor) -> Tensor:  # noqa: ARG002 (content does not matter)
        K, S, _ = keys_KSD.shape
        return torch.arange(S, device=q_KRD.device).float().expand(K, S)

    def forget(self) -> None:
        pass


class HeavyHitters:
    """Accumulated attention. It costs a second attention pass over the prompt, and is here for comparison."""

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
                q_KGTD = (
                    queries_LTHD[layer, first:last].unflatten(1, (K, H // K)).permute(1, 2, 0, 3)
                )
                scores_KRS = (q_KGTD / math.sqrt(D)).reshape(K, -1, D) @ keys_KSD[
                    :, :seen
                ].transpose(1, 2)
                scores_KGTS = scores_KRS.float().view(K, H // K, last - first, seen)
                future = torch.ones(
                    last - first, last - first, dtype=torch.bool, device=full.device
                ).triu_(1)
                scores_KGTS[..., first - last :].masked_fill_(future, -math.inf)
                self._received[layer, b, :, :seen] += scores_KGTS.softmax(-1).sum((1, 2))

    def scores(self, layer: int, b: int, q_KRD: Tensor, keys_KSD: Tensor) -> Tensor:  # noqa: ARG002 (the past decides)
        return self._received[layer, b, :, : keys_KSD.shape[1]]

    def forget(self) -> None:
        self._received.zero_()


def attention_received(q_KRD: Tensor, keys_KND: Tensor) -> Tensor:
    """Softmax attention of R queries over N keys, added up: (K, N) float32."""
    scores_KRN = (q_KRD / math.sqrt(q_KRD.shape[-1])) @ keys_KND.transpose(1, 2)
    return scores_KRN.float().softmax(-1).sum(1)
