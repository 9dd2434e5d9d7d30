"""Policies: which tokens of the full cache the retrieval cache holds.

At every rebuild a policy scores, for each layer and row, chunks of the full cache for the queries
of the latest tokens; the best fill the budget. `ChunkRetrieval` is the paper's and the default. The
whole code of another policy, which keeps the chunks with the largest key:

    class Largest(minitri.Policy):
        def scores(self, layer, b, q_KRD, chunks_KNMD):
            return chunks_KNMD.float().norm(dim=3).amax(2)

    engine.generate(prompt, speculation=minitri.SpeculationConfig(policy=Largest(), budget=64))

A policy changes the speed, not the distribution of the text; its errors become `InputError`s.
Legend: L layers, T tokens, S slots, K KV heads, H query heads, D head dim, N chunks, M tokens of a
chunk, R = H / K times tokens in the observation window.
"""

import torch
from torch import Tensor

from minitri.core.caches.full import FullCache

NEIGHBOR = 0.99  # least share of a chunk's score that the next one gets; below 1: no ties


class Policy:
    """Base class of policies, which score chunks of the KV cache: derive from it, write `scores`.
    Give an object to `SpeculationConfig(policy=...)`. Every run works with a deep copy."""

    wants_prompt: bool = False  # whether `observe` must see the queries of the whole prompt

    def scores(self, layer: int, b: int, q_KRD: Tensor, chunks_KNMD: Tensor) -> Tensor:
        """Scores (K, N) of row b's N chunks of keys for its R latest queries; the best are kept."""
        raise NotImplementedError

    def observe(self, full: FullCache, b: int, queries_LTHD: Tensor, end: int) -> None:
        """Called when `full` holds row b's first `end` tokens, with rotated queries of T new ones.
        `full.layers(b)` gives the row's keys and values (K, S, D), layer by layer."""

    def reset(self, b: int) -> None:
        """Drops all state of row b, in which another text begins."""


class ChunkRetrieval(Policy):
    """The paper's policy: attention to the mean key of each chunk (TriForce, section 4.1).
    A chunk after one of a high score gets a high score, too: a fact may cross their border."""

    def scores(self, layer: int, b: int, q_KRD: Tensor, chunks_KNMD: Tensor) -> Tensor:  # noqa: ARG002
        # On a CPU the mean of 16-bit numbers takes twice as long as their sum.
        scores_KN = attention_received(q_KRD, chunks_KNMD.sum(2) / chunks_KNMD.shape[2])
        scores_KN[:, 1:] = torch.maximum(scores_KN[:, 1:], NEIGHBOR * scores_KN[:, :-1])
        return scores_KN


def attention_received(q_KRD: Tensor, keys_KND: Tensor) -> Tensor:
    """Softmax attention over N keys, summed over R queries: (K, N) float32."""
    # In float32, which CPUs without instructions for bfloat16 multiply ten times as fast.
    scores_KRN = (q_KRD.float() * q_KRD.shape[-1] ** -0.5) @ keys_KND.float().transpose(1, 2)
    return scores_KRN.softmax(-1).sum(1)
