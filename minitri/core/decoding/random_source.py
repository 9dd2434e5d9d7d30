"""Random sources: where the random numbers of a cascade come from, each row's from its own seed.

No independent number is used twice: a test that shares its number with the guess that it tests is
biased. Coupled noise may be shared: what is emitted is always the verifier's own argmax.
"""

import copy
from typing import Any, Self

import torch
from torch import Tensor

from minitri.core.decoding.noise import gumbel_argmax, noise_keys
from minitri.core.decoding.sampling import sample
from minitri.core.decoding.verification import (
    Active,
    Proposal,
    Rows,
    Rule,
    Run,
    decide,
    run_now,
    verify,
    verify_block,
    verify_coupled,
)
from minitri.core.settings import SpeculationConfig


class RandomSource:
    """Samples tokens and verifies proposals with its own random numbers."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.run: Run = run_now
        """Computes what the rule decides; a run that captures graphs sets another."""
        self._by_row: dict[int, Any] = {}  # seeds, or their generators

    def restart(self, b: int, seed: int) -> None:
        """Gives row b to another text, with this seed."""
        self._by_row[b] = seed

    def of_rows(self, rows: slice) -> Self:
        """The source of these rows alone, counted from 0; their numbers are not used twice."""
        part = copy.copy(self)
        part._by_row = {b - rows.start: state for b, state in self._by_row.items()}
        return part

    def numbers(self, counts: list[int], starts: list[int], active: Active) -> Tensor:
        """What decides about `counts[b]` guesses that begin at position `starts[b]` of row b, and
        about the token after them, (B, N + 1); on the host. Only active rows take numbers."""
        raise NotImplementedError

    def sample(self, probs_BV: Tensor, starts: list[int], active: Active) -> Tensor:
        """A token (B,) of each row, for position `starts[b]`; the host does not wait for it."""
        numbers_B = self.numbers([0] * len(starts), starts, active).squeeze(1)
        return sample_by_number(probs_BV, numbers_B.to(probs_BV.device, non_blocking=True))

    def verify(
        self, proposal: Proposal, probs_BNV: Tensor, starts: list[int], active: Active
    ) -> Rows:
        """See `decide`; a proposal begins at position `starts[b]`. Inactive rows mean nothing."""
        numbers_BN = self.numbers(proposal.counts, starts, active)
        return decide(self._rule, proposal, probs_BNV, numbers_BN, self.run)


def sample_by_number(probs_BV: Tensor, numbers_B: Tensor) -> Tensor:
    """A token (B,) of each row, by uniform numbers (float64) or by keys of noise (int64)."""
    choose = sample if numbers_B.is_floating_point() else gumbel_argmax
    return choose(probs_BV, numbers_B)


class IndependentSource(RandomSource):
    """Fresh uniform numbers for every decision, from one generator per row."""

    def __init__(self, kind: str = SpeculationConfig.verification) -> None:
        """`kind`: of verification, as in `SpeculationConfig`."""
        super().__init__(verify_block if kind == "block" else verify)

    def restart(self, b: int, seed: int) -> None:
        self._by_row[b] = torch.Generator().manual_seed(seed)

    def numbers(self, counts: list[int], starts: list[int], active: Active) -> Tensor:  # noqa: ARG002
        uniforms_BN = torch.zeros(len(active), max(counts) + 1, dtype=torch.float64)
        for b, n in enumerate(counts):
            if active[b]:  # the last one is for the token after the guesses
                uniforms_BN[b, [*range(n), -1]] = self.uniforms(b, n + 1)
        return uniforms_BN

    def uniforms(self, b: int, count: int) -> Tensor:
        """The next float64 numbers in [0, 1) of row b."""
        return torch.rand(count, dtype=torch.float64, generator=self._by_row[b])


class CoupledSource(RandomSource):
    """Noise by seed and position, the same for every level that samples for a position."""

    def __init__(self) -> None:
        super().__init__(verify_coupled)

    def numbers(self, counts: list[int], starts: list[int], active: Active) -> Tensor:  # noqa: ARG002
        places_N = torch.arange(max(counts) + 1)
        return torch.stack([self.keys(b, start + places_N) for b, start in enumerate(starts)])

    def keys(self, b: int, positions: Tensor) -> Tensor:
        """The keys of the noise of some positions of row b."""
        return noise_keys(self._by_row.get(b, 0), positions)
