"""Policies: which of the target's tokens the retrieval cache holds.

A policy scores units of the full cache, chunks or single tokens, for the queries of the latest
tokens; the best fill the budget. Sinks and the latest tokens are kept whatever their score: that is
the cache's business. `ChunkRetrieval` is the paper's and the default. The others exist to be
compared with it and stand apart, in `benchmarks/policies.py`.

To add a policy, write a class with this protocol and name it in `make_policy` and in
`settings.POLICIES`.

With grouped-query attention the G query heads of a KV head share its slots, so their attention is
added up, and so is that of the tokens in the observation window.

Legend: L layers, B batch, T tokens, S slots, K KV heads, G query heads per KV head, H = K G,
D head dim, N units, M tokens of a unit, R = G times tokens in the observation window.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from minitri.caches.full import FullCache

TOKENS_AT_ONCE = 256
"""`ChunkRetrieval` averages about so many keys at a time, of all layers; a GPU copies them."""

NEIGHBOR = 0.99
"""Share of a chunk's score that the next chunk gets at least; below 1, so that they never tie."""


class Policy(Protocol):
    """A rule for what to keep."""

    unit: int
    """Tokens that are kept or dropped together, M."""
    wants_prompt: bool
    """Whether `observe` must see the queries of the whole prompt."""

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:
        """Learns that row b's sequence now reaches to `end`; queries of its last T tokens."""

    def scores(self, layer: int, b: int, q_KRD: Tensor, keys_KSD: Tensor) -> Tensor:
        """Importance (K, N) to the latest queries of the N = S // M whole units of the keys."""

    def reset(self, b: int) -> None:
        """Drops all that was observed of row b."""


def make_policy(name: str, full: FullCache, chunk_size: int) -> Policy:
    """The policy of a name in `settings.POLICIES`, for the rows of a full cache."""
    if name == "retrieval":
        return ChunkRetrieval(full, chunk_size)
    from minitri.benchmarks import policies  # here, because the default does without

    others = {"topk": policies.TopTokens, "streaming": policies.LatestTokens}
    return policies.HeavyHitters(full) if name == "h2o" else others[name]()


class ChunkRetrieval:
    """Attention to the mean key of each chunk. Means are made once, when a chunk is whole; where
    not all layers are on the device, from the keys that visit it, whenever scores are asked for.

    A chunk counts nearly as much as the one before it, at least: what a query looks for often
    begins in one chunk and ends in the next, which only later queries will look for. In the needle
    test a number that lay across a border was lost without this.
    """

    wants_prompt = False

    def __init__(self, full: FullCache, chunk_size: int) -> None:
        L, B, K, S, D = full.shape
        self.unit = chunk_size
        self._is_kept = full.on_chip == L
        shape = (L * self._is_kept, B, K, S // chunk_size, D)
        self._means = torch.empty(shape, dtype=full.dtype, device=full.device)
        self._num_means = [0] * B

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:  # noqa: ARG002
        M, whole = self.unit, end // self.unit if self._is_kept else 0
        while (done := self._num_means[b]) < whole:
            upto = self._num_means[b] = min(whole, done + -(-TOKENS_AT_ONCE // M))
            keys_LKTD, _ = full.tokens(b, done * M, upto * M)
            self._means[:, b, :, done:upto] = keys_LKTD.unflatten(2, (upto - done, M)).mean(3)

    def scores(self, layer: int, b: int, q_KRD: Tensor, keys_KSD: Tensor) -> Tensor:
        M, N = self.unit, keys_KSD.shape[1] // self.unit
        units_KNMD = keys_KSD[:, : N * M].unflatten(1, (N, M))
        means_KND = self._means[layer, b, :, :N] if self._is_kept else units_KNMD.mean(2)
        scores_KN = attention_received(q_KRD, means_KND)
        scores_KN[:, 1:] = torch.maximum(scores_KN[:, 1:], NEIGHBOR * scores_KN[:, :-1])
        return scores_KN

    def reset(self, b: int) -> None:
        self._num_means[b] = 0


def attention_received(q_KRD: Tensor, keys_KND: Tensor) -> Tensor:
    """Softmax attention of R queries over N keys, added up: (K, N) float32."""
    scores_KRN = (q_KRD / math.sqrt(q_KRD.shape[-1])) @ keys_KND.transpose(1, 2)
    return scores_KRN.float().softmax(-1).sum(1)
