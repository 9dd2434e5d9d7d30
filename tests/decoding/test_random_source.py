"""The random numbers of real runs: every decision of every level, row and step has its own.

`test_noise.py` looks at the numbers themselves; here the real engine runs and what it draws is
noted on its way into the verification.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from minitri import End, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.decoding import random_source
from minitri.decoding.random_source import CoupledSource, IndependentSource
from minitri.decoding.verification import verify, verify_coupled
from tests.cascades import tiny_engine

PROMPTS = [[5, 6, 7, 8] * 10, [9, 10, 11], list(range(20, 90))]
SAMPLING = SamplingParams(1.1, top_p=0.95)
SPECULATION = {"gamma1": 2, "gamma2": 3, "budget": 24, "num_recent_tokens": 20}


class Recorder:
    """Notes the numbers of each row in the order in which they are drawn, decision by decision."""

    def __init__(self, monkeypatch) -> None:
        self.decisions: dict[int, list[list[float]]] = {}
        self.keys: dict[int, dict[int, set[int]]] = {}
        self._active: list[bool] = []
        self._starts: list[int] = []
        for source in (IndependentSource, CoupledSource):
            monkeypatch.setattr(source, "verify", self._noting(source.verify))
        monkeypatch.setattr(random_source, "verify", self._verify)
        monkeypatch.setattr(random_source, "verify_coupled", self._verify_coupled)

    def _noting(self, real):
        def noted(source, proposal, probs_BNV, starts, active):
            self._active, self._starts = active, starts
            return real(source, proposal, probs_BNV, starts, active)

        return noted

    def _verify(self, proposal, probs_BNV, uniforms_BN):
        assert uniforms_BN.dtype == torch.float64
        for b, n in enumerate(proposal.counts):
            if self._active[b]:
                numbers = [*uniforms_BN[b, :n].tolist(), float(uniforms_BN[b, -1])]
                self.decisions.setdefault(b, []).append(numbers)
        return verify(proposal, probs_BNV, uniforms_BN)

    def _verify_coupled(self, proposal, probs_BNV, keys):
        for b, row in enumerate(keys):
            if self._active[b]:
                for i, key in enumerate(row[: proposal.counts[b] + 1]):
                    places = self.keys.setdefault(b, {})
                    places.setdefault(self._starts[b] + i, set()).add(key)
        return verify_coupled(proposal, probs_BNV, keys)


def run(monkeypatch, prompts, *, seeds, method, num_new=40, coupled=False):
    """What was recorded, and the tokens of each row."""
    with monkeypatch.context() as patching:
        recorder = Recorder(patching)
        events = tiny_engine().generate(
            prompts, sampling=SAMPLING, generation=GenerationConfig(num_new, ignore_eos=True),
            speculation=SpeculationConfig(method, coupled=coupled, **SPECULATION), seed=seeds,
        )  # fmt: skip
        tokens = {event.row: event.token_ids for event in events if isinstance(event, End)}
    return recorder, tokens


METHODS = ["autoregressive", "naive", "retrieval", "triforce"]


@pytest.mark.parametrize("method", METHODS)
def test_all_numbers_of_a_run_are_distinct(monkeypatch, method):
    """Of all rows, levels and steps, the tests of a proposal and the token behind them; 53 bits
    make a coincidence a matter of 1 in 10^9 runs."""
    recorder, _ = run(monkeypatch, PROMPTS, seeds=[0, 1, 2], method=method)
    numbers = [n for row in recorder.decisions.values() for n in itertools.chain(*row)]
    assert len(set(numbers)) == len(numbers) > 100
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.parametrize("method", METHODS)
def test_a_rows_numbers_do_not_depend_on_its_neighbours(monkeypatch, method):
    """The same numbers for the same decisions alone, between others, and after others have
    ended."""
    together, tokens = run(monkeypatch, PROMPTS, seeds=[7, 8, 9], method=method)
    for b, prompt in enumerate(PROMPTS):
        alone, own = run(monkeypatch, [prompt], seeds=[7 + b], method=method)
        assert own[0] == tokens[b]
        assert alone.decisions[0] == together.decisions[b]


def test_numbers_of_neighbouring_seeds_are_unrelated():
    """Correlation of 20,000 numbers, at every shift up to 3; 6 standard errors are a false alarm
    of 1 in 10^7."""
    size = 20_000
    rows = torch.stack([
        torch.rand(size, dtype=torch.float64, generator=generator)
        for generator in IndependentSource([0, 1, 2, 2**32 - 1])._generators
    ])  # fmt: skip
    for (a, left), (b, right) in itertools.product(enumerate(rows), repeat=2):
        for shift in range(4):
            if (a, shift) != (b, 0):
                pair = torch.stack((left[: size - shift], right[shift:]))
                assert float(torch.corrcoef(pair)[0, 1].abs()) < 6 / size**0.5


@pytest.mark.parametrize("method", METHODS)
def test_coupled_noise_belongs_to_a_seed_and_a_position(monkeypatch, method):
    """All levels that sample for a position of a row use one key; no other place has it."""
    recorder, _ = run(monkeypatch, PROMPTS, seeds=[3, 4, 5], method=method, coupled=True)
    keys = []
    for b, places in recorder.keys.items():
        assert set(places) >= set(range(len(PROMPTS[b]), len(PROMPTS[b]) + 40))
        assert all(len(found) == 1 for found in places.values())
        keys += [key for found in places.values() for key in found]
    assert len(set(keys)) == len(keys)
