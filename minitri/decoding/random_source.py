"""Random sources: where the random numbers of a cascade come from.

A row takes numbers from its own seed only. No independent number is used twice: a test that shares
its number with the guess that it tests is biased. Coupled noise may be shared: what is emitted is
always the verifier's own argmax.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minitri.decoding.noise import gumbel_argmax, noise_key
from minitri.decoding.sampling import sample
from minitri.decoding.verification import (
    Active,
    Proposal,
    Rows,
    integers,
    verify,
    verify_block,
    verify_coupled,
)
from minitri.settings import SpeculationConfig


class IndependentSource:
    """Fresh uniform numbers for every decision, from one generator per row."""

    def __init__(
        self, seeds: Sequence[int] = (), kind: str = SpeculationConfig.verification
    ) -> None:
        """`seeds` of the first rows; `kind`: of verification, as in `SpeculationConfig`."""
        self._verify = verify_block if kind == "block" else verify
        self._generators: dict[int, torch.Generator] = {}
        for b, seed in enumerate(seeds):
            self.restart(b, seed)

    def restart(self, b: int, seed: int) -> None:
        """Gives row b to another text, with this seed."""
        self._generators[b] = torch.Generator().manual_seed(seed)

    def sample(self, probs_BV: Tensor, starts: list[int], active: Active) -> Tensor:
        """A token (B,) of each row, for position `starts[b]`; the host does not wait for it. Rows
        that are not active use no random numbers, here and below, and get what means nothing."""
        return sample(probs_BV, self._draw([0] * len(starts), active, probs_BV).squeeze(1))

    def verify(
        self, proposal: Proposal, probs_BNV: Tensor, _starts: list[int], active: Active
    ) -> Rows:
        """Verifies a proposal that begins at position `starts[b]` of row b: see `verify`."""
        return self._verify(proposal, probs_BNV, self._draw(proposal.counts, active, probs_BNV))

    def _draw(self, counts: list[int], active: Active, like: Tensor) -> Tensor:
        """Numbers (B, N + 1) for each row's tests, and last for the token after them."""
        uniforms_BN = torch.zeros(len(active), max(counts) + 1, dtype=torch.float64)
        for b, n in enumerate(counts):
            if active[b]:
                uniforms_BN[b, [*range(n), -1]] = self.uniforms(b, n + 1)
        return uniforms_BN.to(like.device, non_blocking=True)

    def uniforms(self, b: int, count: int) -> Tensor:
        """The next float64 numbers in [0, 1) of row b."""
        return torch.rand(count, dtype=torch.float64, generator=self._generators[b])


class CoupledSource:
    """Noise by seed and position, the same for every level that samples for a position."""

    def __init__(self, seeds: Sequence[int] = ()) -> None:
        self._seeds = dict(enumerate(seeds))

    def restart(self, b: int, seed: int) -> None:
        """Gives row b to another text, with this seed."""
        self._seeds[b] = seed

    def sample(self, probs_BV: Tensor, starts: list[int], _active: Active) -> Tensor:
        keys = [self.key(b, start) for b, start in enumerate(starts)]
        return gumbel_argmax(probs_BV, integers(keys, probs_BV.device))

    def verify(
        self, proposal: Proposal, probs_BNV: Tensor, starts: list[int], _active: Active
    ) -> Rows:
        places = range(max(proposal.counts) + 1)
        keys = [[self.key(b, start + i) for i in places] for b, start in enumerate(starts)]
        return verify_coupled(proposal, probs_BNV, keys)

    def key(self, b: int, position: int) -> int:
        """The key of the noise of a position of row b."""
        return noise_key(self._seeds.get(b, 0), position)


RandomSource = IndependentSource | CoupledSource
