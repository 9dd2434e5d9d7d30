"""Where a cascade's random numbers come from: independent ones per row, or noise tied to (seed, position).

Both offer one call, `judge`, with which every level decides about a proposal. A row draws only from its own source, so
its tokens do not depend on what else is in the batch.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from minitri.decoding.verification import Proposal, Verdict, noise_key, verify, verify_coupled


class Coins(Protocol):
    """A source of randomness."""

    def judge(
        self, proposal: Proposal, laws_BNV: Tensor, starts: list[int], active: list[bool]
    ) -> Verdict:
        """Decides about a proposal whose first token in row b stands at position `starts[b]` of its sequence.

        Rows that are not active use up no randomness; what the verdict says about them means nothing.
        """
        ...


class IndependentCoins:
    """Fresh numbers for every decision, from one generator per row."""

    def __init__(self, seeds: list[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def judge(
        self, proposal: Proposal, laws_BNV: Tensor, starts: list[int], active: list[bool]
    ) -> Verdict:  # noqa: ARG002 (coupled coins need the positions)
        N = max(proposal.counts)
        uniforms_BN = torch.zeros(len(active), N + 1, dtype=torch.float64)
        for b, count in enumerate(proposal.counts):
            if active[b]:
                drawn = torch.rand(count + 1, dtype=torch.float64, generator=self._generators[b])
                uniforms_BN[b, :count], uniforms_BN[b, N] = drawn[:count], drawn[count]
        return verify(proposal, laws_BNV, uniforms_BN.to(laws_BNV.device, non_blocking=True))


class CoupledCoins:
    """Noise that is the same for every level that draws for a position, so a seed fixes the text for every method."""

    def __init__(self, seeds: list[int]) -> None:
        self._seeds = seeds

    def judge(
        self, proposal: Proposal, laws_BNV: Tensor, starts: list[int], active: list[bool]
    ) -> Verdict:  # noqa: ARG002 (noise is not used up)
        width = max(proposal.counts) + 1
        keys = [
            [noise_key(seed, start + i) for i in range(width)]
            for seed, start in zip(self._seeds, starts, strict=True)
        ]
        return verify_coupled(proposal, laws_BNV, keys)
