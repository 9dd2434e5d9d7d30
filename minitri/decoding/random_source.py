"""Random sources: where the random numbers of a cascade come from.

`IndependentSource` is the default: fresh numbers for every decision. `CoupledSource` ties noise to
(seed, position), so that a seed gives the same text whatever the method. With either, a row takes
numbers from its own seed only, so its tokens do not depend on what else is in the batch.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from minitri.decoding.noise import gumbel_argmax, noise_key
from minitri.decoding.sampling import sample
from minitri.decoding.verification import Proposal, Verdict, verify, verify_block, verify_coupled
from minitri.settings import SpeculationConfig


class RandomSource(Protocol):
    """Samples tokens and verifies proposals with its own random numbers."""

    def sample(self, probs_BV: Tensor, starts: list[int], active: list[bool]) -> Tensor:
        """A token (B,) of each row, for position `starts[b]`; the host does not wait for it."""

    def verify(
        self, proposal: Proposal, probs_BNV: Tensor, starts: list[int], active: list[bool]
    ) -> Verdict:
        """The verdict about a proposal that begins at position `starts[b]` of row b.

        `probs_BNV` (B, N + 1, V) are the verifier's distributions. Rows that are not active use no
        random numbers; what the verdict says about them means nothing.
        """


class IndependentSource:
    """Fresh uniform numbers for every decision, from one generator per row."""

    def __init__(
        self, seeds: Sequence[int] = (), kind: str = SpeculationConfig.verification
    ) -> None:
        """`seeds` of the first rows; `kind`: of verification, as in `SpeculationConfig`."""
        self._is_by_block = kind == "block"
        self._generators: dict[int, torch.Generator] = {}
        for b, seed in enumerate(seeds):
            self.restart(b, seed)

    def restart(self, b: int, seed: int) -> None:
        """Gives row b to another text, with this seed."""
        self._generators[b] = torch.Generator().manual_seed(seed)

    def sample(self, probs_BV: Tensor, starts: list[int], active: list[bool]) -> Tensor:
        uniforms_B1 = self._draw([0] * len(starts), active)
        return sample(probs_BV, uniforms_B1.squeeze(1).to(probs_BV.device, non_blocking=True))

    def verify(
        self,
        proposal: Proposal,
        probs_BNV: Tensor,
        starts: list[int],  # noqa: ARG002 (noise by position needs them)
        active: list[bool],
    ) -> Verdict:
        uniforms_BN = self._draw(proposal.counts, active)
        decide = verify_block if self._is_by_block else verify
        return decide(proposal, probs_BNV, uniforms_BN.to(probs_BNV.device, non_blocking=True))

    def _draw(self, counts: list[int], active: list[bool]) -> Tensor:
        """Numbers (B, N + 1) for each row's tests, and last for the token after them."""
        N = max(counts)
        uniforms_BN = torch.zeros(len(active), N + 1, dtype=torch.float64)
        for b, n in enumerate(counts):
            if active[b]:
                drawn = torch.rand(n + 1, dtype=torch.float64, generator=self._generators[b])
                uniforms_BN[b, :n] = drawn[:n]
                uniforms_BN[b, N] = drawn[n]
        return uniforms_BN


class CoupledSource:
    """Noise by seed and position, the same for every level that samples for a position."""

    def __init__(self, seeds: Sequence[int] = ()) -> None:
        self._seeds = dict(enumerate(seeds))

    def restart(self, b: int, seed: int) -> None:
        """Gives row b to another text, with this seed."""
        self._seeds[b] = seed

    def sample(self, probs_BV: Tensor, starts: list[int], active: list[bool]) -> Tensor:  # noqa: ARG002
        keys_B1 = torch.tensor(self._keys(starts, 1)).to(probs_BV.device, non_blocking=True)
        return gumbel_argmax(probs_BV, keys_B1.squeeze(1))

    def verify(
        self,
        proposal: Proposal,
        probs_BNV: Tensor,
        starts: list[int],
        active: list[bool],  # noqa: ARG002 (noise is not used up)
    ) -> Verdict:
        keys = self._keys(starts, max(proposal.counts) + 1)
        return verify_coupled(proposal, probs_BNV, keys)

    def _keys(self, starts: list[int], count: int) -> list[list[int]]:
        """Keys of the noise of `count` positions."""
        rows = [(self._seeds.get(b, 0), start) for b, start in enumerate(starts)]
        return [[noise_key(seed, start + i) for i in range(count)] for seed, start in rows]
