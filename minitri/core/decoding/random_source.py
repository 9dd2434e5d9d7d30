"""Random sources: the random numbers of a cascade, each row's from its own seed.

No independent number is used twice: a test that shares its number with the guess it tests is
biased. Coupled noise may be shared, because the emitted token is always the verifier's argmax.
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
        self.run: Run = run_now  # a run that captures graphs sets another function
        self._by_row: dict[int, Any] = {}  # seeds, or their generators

    def restart(self, b: int, seed: int) -> None:
        """Starts another text with this seed in row b."""
        self._by_row[b] = seed

    def of_rows(self, rows: slice) -> Self:
        """A view of this source on a slice of the rows, which shares their generators."""
        part = copy.copy(self)
        part._by_row = {b - rows.start: state for b, state in self._by_row.items()}
        return part

    def numbers(self, counts: list[int], starts: list[int], active: Active) -> Tensor:
        """Random numbers (B, N + 1), on the host, to verify `counts[b]` guesses from position
        `starts[b]` on, and the last for the token after them; inactive rows draw none."""
        raise NotImplementedError

    def sample(self, probs_BV: Tensor, starts: list[int], active: Active) -> Tensor:
        """One token (B,) per row, for position `starts[b]`; the host does not wait for it."""
        numbers_B = self.numbers([0] * len(starts), starts, active).squeeze(1)
        return sample_by_number(probs_BV, numbers_B.to(probs_BV.device, non_blocking=True))

    def verify(
        self, proposal: Proposal, probs_BNV: Tensor, starts: list[int], active: Active
    ) -> Rows:
        """Verifies a proposal with random numbers: the tokens of each active row, see `decide`."""
        numbers_BN = self.numbers(proposal.counts, starts, active)
        return decide(self._rule, proposal, probs_BNV, numbers_BN, self.run)


def sample_by_number(probs_BV: Tensor, numbers_B: Tensor) -> Tensor:
    """One token (B,) per row, by uniform numbers (float64) or by keys of Gumbel noise (int64)."""
    choose = sample if numbers_B.is_floating_point() else gumbel_argmax
    return choose(probs_BV, numbers_B)


class IndependentSource(RandomSource):
    """Fresh uniform numbers for every decision, from one generator per row."""

    def __init__(self, kind: str = SpeculationConfig.verification) -> None:
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
    """Gumbel noise keyed by seed and position, shared by all levels."""

    def __init__(self) -> None:
        super().__init__(verify_coupled)

    def numbers(self, counts: list[int], starts: list[int], active: Active) -> Tensor:  # noqa: ARG002
        places_N = torch.arange(max(counts) + 1)
        return torch.stack([self.keys(b, start + places_N) for b, start in enumerate(starts)])

    def keys(self, b: int, positions: Tensor) -> Tensor:
        """Noise keys of positions of row b."""
        return noise_keys(self._by_row.get(b, 0), positions)
