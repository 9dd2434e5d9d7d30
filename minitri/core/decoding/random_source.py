"""Random sources: the random numbers of a cascade, from one seed per row of the batch.

No independent number is used twice: a test that shares its number with the guess it tests is
biased. Levels may share coupled noise: each emits argmax(log p + noise), and no test is random.
Legend: B rows, N guesses, V vocab.
"""

import copy
from typing import Any, Self

import torch
from torch import Tensor

from minitri.core.decoding.sampling import gumbel_argmax, noise_keys, sample
from minitri.core.decoding.verification import (
    Active,
    Proposal,
    Rows,
    Rule,
    decide,
    verify,
    verify_block,
    verify_coupled,
)
from minitri.core.settings import SpeculationConfig


class RandomSource:
    """Base class of random sources: samples tokens and verifies proposals."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.run_rule = rule  # `Stack` may set one of `Execution.rules`, or its captured graphs
        self._by_row = dict[int, Any]()  # seed or generator of each row

    def restart(self, b: int, seed: int) -> None:
        self._by_row[b] = seed

    def of_rows(self, rows: slice) -> Self:
        part = copy.copy(self)
        part._by_row = {b - rows.start: state for b, state in self._by_row.items()}
        return part

    def numbers(self, counts: list[int], starts: list[int], active: Active) -> Tensor:
        """Random numbers (B, N + 1) of N tests and a token: float64 uniforms or int64 Gumbel keys.
        Row b has `counts[b]` guesses, from position `starts[b]` on; inactive rows draw none."""
        raise NotImplementedError

    def sample(self, probs_BV: Tensor, starts: list[int], active: Active) -> Tensor:
        """Samples a token (B,) of each active row, at position `starts[b]`; without a host sync."""
        numbers_B = self.numbers([0] * len(starts), starts, active).squeeze(1)
        return sample_by_number(probs_BV, numbers_B.to(probs_BV.device, non_blocking=True))

    def verify(
        self, proposal: Proposal, probs_BNV: Tensor, starts: list[int], active: Active
    ) -> Rows:
        """Verifies active row b's guesses, from position `starts[b]` on, by the verifier's p
        (B, N + 1, V); returns the tokens that each row emits."""
        numbers_BN = self.numbers(proposal.counts, starts, active)
        return decide(self.run_rule, proposal, probs_BNV, numbers_BN)


def sample_by_number(probs_BV: Tensor, numbers_B: Tensor) -> Tensor:
    """Samples one token (B,) per row by uniforms (float64) or by keys of Gumbel noise (int64)."""
    choose = sample if numbers_B.is_floating_point() else gumbel_argmax
    return choose(probs_BV, numbers_B)


class IndependentSource(RandomSource):
    """Draws fresh uniforms, by one generator per row; `kind` of verification: block or token."""

    def __init__(self, kind: str = SpeculationConfig.verification) -> None:
        super().__init__(verify_block if kind == "block" else verify)

    def restart(self, b: int, seed: int) -> None:
        self._by_row[b] = torch.Generator().manual_seed(seed)

    def numbers(self, counts: list[int], starts: list[int], active: Active) -> Tensor:  # noqa: ARG002
        rows = [[0.0] * (max(counts) + 1) for _ in counts]
        for b, n in enumerate(counts):
            if active[b]:  # the last number is for the token after the guesses
                *rows[b][:n], rows[b][-1] = self.uniforms(b, n + 1).tolist()
        return torch.tensor(rows, dtype=torch.float64)

    def uniforms(self, b: int, count: int) -> Tensor:
        return torch.rand(count, dtype=torch.float64, generator=self._by_row[b])


class CoupledSource(RandomSource):
    """Random source of Gumbel noise keyed by seed and position, the same for all levels."""

    def __init__(self) -> None:
        super().__init__(verify_coupled)

    def numbers(self, counts: list[int], starts: list[int], active: Active) -> Tensor:  # noqa: ARG002
        places_N = torch.arange(max(counts) + 1)
        return torch.stack([self.keys(b, start + places_N) for b, start in enumerate(starts)])

    def keys(self, b: int, positions: Tensor) -> Tensor:
        """Keys, int64, from which Gumbel noise at these positions of row b's text is computed."""
        return noise_keys(self._by_row.get(b, 0), positions)
