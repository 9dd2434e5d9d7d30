"""Policies: which of the target's tokens the retrieval cache holds.

At every rebuild a policy scores, for each layer and row, chunks of the full cache for the queries
of the latest tokens; the best fill the budget, next to sinks and latest tokens. `ChunkRetrieval` is
the paper's and the default. The whole of another one, which keeps the chunks with the largest key:

    class Largest(minitri.Policy):
        def scores(self, layer, b, q_KRD, chunks_KNMD):
            return chunks_KNMD.float().norm(dim=3).amax(2)

    engine.generate(prompt, speculation=minitri.SpeculationConfig(policy=Largest(), budget=64))

It changes the speed, and no text. One that raises, or whose scores have another shape or are NaN,
ends the run with an `InputError`.

Legend: L layers, B batch, T tokens, S slots, K KV heads, G query heads per KV head, H = K G,
D head dim, N chunks, M tokens of a chunk, R = G times tokens in the observation window.
"""

import copy
import functools
import math
from typing import Any, Protocol

import torch
from torch import Tensor

from minitri.caches.full import FullCache, span
from minitri.errors import explain

TOKENS_AT_ONCE = 256
"""`ChunkRetrieval` averages about this many keys at a time, of all layers; a GPU copies them."""
NEIGHBOR = 0.99
"""Share of a chunk's score that the next chunk gets at least; below 1, so that they never tie."""


class Policy(Protocol):
    """Scores chunks: derive from it, and give an object to `SpeculationConfig(policy=...)`. Only
    `scores` must be written. Every run works with a deep copy, so it has a state of its own."""

    wants_prompt: bool = False
    """Whether `observe` must see the queries of the whole prompt, not of its last tokens alone."""

    def scores(self, layer: int, b: int, q_KRD: Tensor, chunks_KNMD: Tensor) -> Tensor:
        """Importance (K, N) of chunks of a layer of row b to the latest queries, all rotated."""
        raise NotImplementedError

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:
        """Learns that row b's sequence now reaches to `end`; queries of its last T tokens.
        `full.layers(b)` gives the row's keys and values (K, S, D), layer by layer."""

    def reset(self, b: int) -> None:
        """Drops all that was observed of row b: another text begins there."""


def make_policy(policy: Any, full: FullCache, chunk_size: int) -> Policy:
    """What `SpeculationConfig.policy` stands for, over a full cache."""
    if policy == "retrieval":
        return ChunkRetrieval(full, chunk_size)
    return CheckedPolicy(policy)


class ChunkRetrieval(Policy):
    """Attention to the mean key of each chunk. Means are made once, when a chunk is whole; where
    not all layers are on the device, from the keys that visit it, whenever scores are asked for.
    A chunk counts nearly as much as the one before it, at least: what a query looks for may end in
    the next one. In the needle test a number that lay across a border was lost without this."""

    def __init__(self, full: FullCache, chunk_size: int) -> None:
        L, B, K, S, D = full.shape
        self._chunk_size = chunk_size
        self._is_kept = full.on_chip == L
        shape = (L * self._is_kept, B, K, S // chunk_size, D)
        self._means = torch.empty(shape, dtype=full.keys.dtype, device=full.device)
        self._num_means = [0] * B

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:  # noqa: ARG002
        M = self._chunk_size
        whole = end // M if self._is_kept else 0
        while (done := self._num_means[b]) < whole:
            upto = self._num_means[b] = min(whole, done + -(-TOKENS_AT_ONCE // M))
            keys_LKTD = span(full.keys[:, b], done * M, upto * M)
            self._means[:, b, :, done:upto] = keys_LKTD.unflatten(2, (upto - done, M)).mean(3)

    def scores(self, layer: int, b: int, q_KRD: Tensor, chunks_KNMD: Tensor) -> Tensor:
        N = chunks_KNMD.shape[1]
        means_KND = self._means[layer, b, :, :N] if self._is_kept else chunks_KNMD.mean(2)
        scores_KN = attention_received(q_KRD, means_KND)
        scores_KN[:, 1:] = torch.maximum(scores_KN[:, 1:], NEIGHBOR * scores_KN[:, :-1])
        return scores_KN

    def reset(self, b: int) -> None:
        self._num_means[b] = 0


class CheckedPolicy:
    """A copy of a policy from outside, whose mistakes end the run with an `InputError`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = copy.deepcopy(policy)
        problem = f"the policy {type(policy).__name__} failed"
        self._named = functools.partial(explain, problem, "correct it")
        self.wants_prompt = getattr(policy, "wants_prompt", False)

    def scores(self, layer: int, b: int, q_KRD: Tensor, chunks_KNMD: Tensor) -> Tensor:
        with self._named():
            scores_KN = self._policy.scores(layer, b, q_KRD, chunks_KNMD)
            if scores_KN.shape != chunks_KNMD.shape[:2] or bool(scores_KN.isnan().any()):
                raise ValueError(f"give numbers of shape {list(chunks_KNMD.shape[:2])}")
        return scores_KN.to(q_KRD.device, torch.float32)

    def observe(self, *seen: Any) -> None:
        with self._named():
            self._policy.observe(*seen)

    def reset(self, b: int) -> None:
        with self._named():
            self._policy.reset(b)


def attention_received(q_KRD: Tensor, keys_KND: Tensor) -> Tensor:
    """Softmax attention of R queries over N keys, added up: (K, N) float32."""
    scores_KRN = (q_KRD / math.sqrt(q_KRD.shape[-1])) @ keys_KND.transpose(1, 2)
    return scores_KRN.float().softmax(-1).sum(1)
