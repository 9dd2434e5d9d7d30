"""Random sources: where the random numbers of a cascade come from.

`IndependentSource` is the default: fresh numbers for every decision. `CoupledSource` ties noise to
(seed, position), so that a seed gives the same text whatever the method. With either, a row takes
numbers from its own seed only, so its tokens do not depend on what else is in the batch.

No independent number is used twice: a test that shares its number with the guess that it tests is
biased. Coupled noise may be shared, as what is emitted is always the verifier's own argmax.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from minitri.decoding.noise import gumbel_argmax, noise_key
from minitri.decoding.sampling import sample
from minitri.decoding.verification import (
    Proposal,
    Run,
    run_now,
    verify,
    verify_block,
    verify_coupled,
)
from minitri.settings import SpeculationConfig


class RandomSource(Protocol):
    """Samples tokens and verifies proposals with its own random numbers."""

    def numbers(self, starts: list[int], active: list[bool]) -> Tensor:
        """What a token of each row, for position `starts[b]`, is sampled by, (B,); on the host."""

    def sample(self, probs_BV: Tensor, starts: list[int], active: list[bool]) -> Tensor:
        """A token (B,) of each row, for position `starts[b]`; the host does not wait for it."""

    def verify(
        self, proposal: Proposal, probs_BNV: Tensor, starts: list[int], active: list[bool]
    ) -> list[list[int]]:
        """Verifies a proposal that begins at position `starts[b]` of row b: see `verify`.

        Rows that are not active use no random numbers; what is returned for them means nothing.
        """


def sample_by_number(probs_BV: Tensor, numbers_B: Tensor) -> Tensor:
    """A token (B,) of each row, by uniform numbers (float64) or by keys of noise (int64)."""
    choose = sample if numbers_B.is_floating_point() else gumbel_argmax
    return choose(probs_BV, numbers_B)


class IndependentSource:
    """Fresh uniform numbers for every decision, from one generator per row."""

    def __init__(
        self,
        seeds: Sequence[int] = (),
        kind: str = SpeculationConfig.verification,
        run: Run = run_now,
    ) -> None:
        """`seeds` of the first rows; `kind`: of verification, as in `SpeculationConfig`; `run`
        computes a verdict."""
        self._run = run
        self._verify = verify_block if kind == "block" else verify
        self._generators: dict[int, torch.Generator] = {}
        for b, seed in enumerate(seeds):
            self.restart(b, seed)

    def restart(self, b: int, seed: int) -> None:
        """Gives row b to another text, with this seed."""
        self._generators[b] = torch.Generator().manual_seed(seed)

    def numbers(self, starts: list[int], active: list[bool]) -> Tensor:
        return self._draw([0] * len(starts), active).squeeze(1)

    def sample(self, probs_BV: Tensor, starts: list[int], active: list[bool]) -> Tensor:
        numbers_B = self.numbers(starts, active)
        return sample_by_number(probs_BV, numbers_B.to(probs_BV.device, non_blocking=True))

    def verify(
        self,
        proposal: Proposal,
        probs_BNV: Tensor,
        starts: list[int],  # noqa: ARG002 (noise by position needs them)
        active: list[bool],
    ) -> list[list[int]]:
        return self._verify(proposal, probs_BNV, self._draw(proposal.counts, active), self._run)

    def _draw(self, counts: list[int], active: list[bool]) -> Tensor:
        """Numbers (B, N + 1) for each row's tests, and last for the token after them."""
        uniforms_BN = torch.zeros(len(active), max(counts) + 1, dtype=torch.float64)
        for b, n in enumerate(counts):
            if active[b]:
                uniforms_BN[b, [*range(n), -1]] = self.uniforms(b, n + 1)
        return uniforms_BN

    def uniforms(self, b: int, count: int) -> Tensor:
        """The next float64 numbers in [0, 1) of row b."""
        return torch.rand(count, dtype=torch.float64, generator=self._generators[b])


class CoupledSource:
    """Noise by seed and position, the same for every level that samples for a position."""

    def __init__(self, seeds: Sequence[int] = (), run: Run = run_now) -> None:
        self._run = run
        self._seeds = dict(enumerate(seeds))

    def restart(self, b: int, seed: int) -> None:
        """Gives row b to another text, with this seed."""
        self._seeds[b] = seed

    def numbers(self, starts: list[int], active: list[bool]) -> Tensor:  # noqa: ARG002
        return torch.tensor([self.key(b, start) for b, start in enumerate(starts)])

    def sample(self, probs_BV: Tensor, starts: list[int], active: list[bool]) -> Tensor:
        numbers_B = self.numbers(starts, active)
        return sample_by_number(probs_BV, numbers_B.to(probs_BV.device, non_blocking=True))

    def verify(
        self,
        proposal: Proposal,
        probs_BNV: Tensor,
        starts: list[int],
        active: list[bool],  # noqa: ARG002 (noise is not used up)
    ) -> list[list[int]]:
        places = range(max(proposal.counts) + 1)
        keys = [[self.key(b, start + i) for i in places] for b, start in enumerate(starts)]
        return verify_coupled(proposal, probs_BNV, keys, self._run)

    def key(self, b: int, position: int) -> int:
        """The key of the noise of a position of row b."""
        return noise_key(self._seeds.get(b, 0), position)
