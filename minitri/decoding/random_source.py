"""Random sources: where the random numbers of a cascade come from.

`IndependentSource` is the default: fresh numbers for every decision. `CoupledSource` ties noise to
(seed, position), so that a seed gives the same text whatever the method. With either, a row takes
numbers from its own seed only, so its tokens do not depend on what else is in the batch.
"""

from typing import Protocol

import torch
from torch import Tensor

from minitri.decoding.noise import noise_key
from minitri.decoding.verification import Proposal, Verdict, verify, verify_block, verify_coupled
from minitri.settings import SpeculationConfig


class RandomSource(Protocol):
    """Verifies proposals with its own random numbers."""

    def verify(
        self, proposal: Proposal, probs_BNV: Tensor, starts: list[int], active: list[bool]
    ) -> Verdict:
        """The verdict about a proposal that begins at position `starts[b]` of row b.

        `probs_BNV` (B, N + 1, V) are the verifier's distributions. Rows that are not active use no
        random numbers; what the verdict says about them means nothing.
        """


class IndependentSource:
    """Fresh uniform numbers for every decision, from one generator per row."""

    def __init__(self, seeds: list[int], kind: str = SpeculationConfig.verification) -> None:
        """`kind`: of verification, as in `SpeculationConfig`."""
        self._is_by_block = kind == "block"
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def restart(self, b: int, seed: int) -> None:
        """Gives row b to another text, with this seed."""
        self._generators[b] = torch.Generator().manual_seed(seed)

    def verify(
        self,
        proposal: Proposal,
        probs_BNV: Tensor,
        starts: list[int],  # noqa: ARG002 (noise by position needs them)
        active: list[bool],
    ) -> Verdict:
        N = max(proposal.counts)
        uniforms_BN = torch.zeros(len(active), N + 1, dtype=torch.float64)
        for b, n in enumerate(proposal.counts):
            if active[b]:
                drawn = torch.rand(n + 1, dtype=torch.float64, generator=self._generators[b])
                uniforms_BN[b, :n], uniforms_BN[b, N] = drawn[:n], drawn[n]
        decide = verify_block if self._is_by_block else verify
        return decide(proposal, probs_BNV, uniforms_BN.to(probs_BNV.device, non_blocking=True))


class CoupledSource:
    """Noise by seed and position, the same for every level that samples for a position."""

    def __init__(self, seeds: list[int]) -> None:
        self._seeds = list(seeds)

    def restart(self, b: int, seed: int) -> None:
        """Gives row b to another text, with this seed."""
        self._seeds[b] = seed

    def verify(
        self,
        proposal: Proposal,
        probs_BNV: Tensor,
        starts: list[int],
        active: list[bool],  # noqa: ARG002 (noise is not used up)
    ) -> Verdict:
        positions = range(max(proposal.counts) + 1)
        keys = [
            [noise_key(seed, start + i) for i in positions]
            for seed, start in zip(self._seeds, starts, strict=True)
        ]
        return verify_coupled(proposal, probs_BNV, keys)
