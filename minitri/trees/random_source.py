"""Random sources that can also draw and verify trees; see `decoding/random_source.py`."""

from typing import Protocol

import torch
from torch import Tensor

from minitri.decoding.noise import gumbel_argmax, gumbel_scores, noise_key
from minitri.decoding.random_source import CoupledSource, IndependentSource, RandomSource
from minitri.trees.verification import (
    TreeProposal,
    draw_children,
    likeliest,
    walk,
    walk_coupled,
)


class TreeSource(RandomSource, Protocol):
    """A random source with the decisions that trees need."""

    is_listed: bool
    """Whether `draw` leaves nothing to chance."""

    def draw(self, b: int, probs_V: Tensor, num_children: int, position: int) -> list[int]:
        """Tokens of a node's children, which stand at `position` of row b's text."""

    def walk(
        self, proposal: TreeProposal, b: int, probs_NV: Tensor, start: int
    ) -> tuple[list[int], int]:
        """The accepted nodes of row b, whose text has `start` tokens, and the token behind them.

        `probs_NV` are the verifier's distributions behind every node.
        """


class IndependentTrees(IndependentSource):
    """Fresh uniform numbers for every child and every test."""

    is_listed = False

    def draw(self, b: int, probs_V: Tensor, num_children: int, position: int) -> list[int]:  # noqa: ARG002
        return draw_children(probs_V, self._uniforms(b, num_children))

    def walk(
        self, proposal: TreeProposal, b: int, probs_NV: Tensor, start: int  # noqa: ARG002
    ) -> tuple[list[int], int]:  # fmt: skip
        # A row without guesses takes as many numbers as it would without trees next to it.
        count = len(proposal.shape) if proposal.has_guesses(b) else 1
        return walk(proposal, b, probs_NV, self._uniforms(b, count))

    def _uniforms(self, b: int, count: int) -> list[float]:
        numbers = torch.rand(count, dtype=torch.float64, generator=self._generators[b])
        return [float(number) for number in numbers]


class CoupledTrees(CoupledSource):
    """Noise by seed and position: all nodes of a position share it, and the walk is that of the
    verifier's own tokens."""

    is_listed = True

    def draw(self, b: int, probs_V: Tensor, num_children: int, position: int) -> list[int]:
        key = torch.tensor(noise_key(self._seeds[b], position)).to(probs_V.device)
        return likeliest(gumbel_scores(probs_V, key), num_children)

    def walk(
        self, proposal: TreeProposal, b: int, probs_NV: Tensor, start: int
    ) -> tuple[list[int], int]:
        depths = proposal.shape.depths
        keys = torch.tensor([noise_key(self._seeds[b], start + depth) for depth in depths])
        return walk_coupled(proposal, b, gumbel_argmax(probs_NV, keys.to(probs_NV.device)).tolist())
