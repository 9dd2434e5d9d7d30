"""The random numbers of real runs: every decision of every level, row and step has its own."""

from functools import partial

import pytest
import torch

from minitri import SamplingParams
from minitri.core.decoding import random_source
from minitri.core.decoding.random_source import RandomSource
from minitri.core.decoding.verification import verify, verify_block, verify_coupled
from tests.cascades import settings_of, texts_of, tiny_engine

PROMPTS = [[5, 6, 7, 8] * 10, [9, 10, 11], list(range(20, 90))]
SAMPLING = SamplingParams(1.1, top_p=0.95)
SPECULATION = {"gamma1": 2, "gamma2": 3, "budget": 24, "num_recent_tokens": 20}


class Recorder:
    """Notes the numbers of each row, by its seed, in the order in which they are drawn, decision by
    decision."""

    def __init__(self, monkeypatch) -> None:
        self.sizes: dict[str, set[int]] = {"token": set(), "block": set()}
        self.decisions: dict[int, list[list[float]]] = {}
        self.keys: dict[int, dict[int, set[int]]] = {}
        self._active: list[bool] = []
        self._starts: list[int] = []
        self._seeds: list[int] = []
        monkeypatch.setattr(RandomSource, "verify", self._noting(RandomSource.verify))
        by_token, by_block = (
            partial(self._verify, *pair) for pair in (("token", verify), ("block", verify_block))
        )
        monkeypatch.setattr(random_source, "verify", by_token)
        monkeypatch.setattr(random_source, "verify_block", by_block)
        monkeypatch.setattr(random_source, "verify_coupled", self._verify_coupled)

    def _noting(self, real):
        def noted(source, proposal, probs_BNV, starts, active):
            self._active, self._starts = active, starts
            states = [source._by_row[b] for b in range(len(active))]
            self._seeds = [it if isinstance(it, int) else it.initial_seed() for it in states]
            return real(source, proposal, probs_BNV, starts, active)

        return noted

    def _verify(self, name, rule, p_BNV, uniforms_BN, guesses):
        assert uniforms_BN.dtype == torch.float64
        counts = guesses.counts_B.tolist()
        self.sizes[name].add(max(counts))
        for b, n in enumerate(counts):
            if self._active[b]:
                numbers = [*uniforms_BN[b, :n].tolist(), float(uniforms_BN[b, -1])]
                self.decisions.setdefault(self._seeds[b], []).append(numbers)
        return rule(p_BNV, uniforms_BN, guesses)

    def _verify_coupled(self, p_BNV, keys_BN, guesses):
        for b, row in enumerate(keys_BN.tolist()):
            if self._active[b]:
                for i, key in enumerate(row[: int(guesses.counts_B[b]) + 1]):
                    places = self.keys.setdefault(self._seeds[b], {})
                    places.setdefault(self._starts[b] + i, set()).add(key)
        return verify_coupled(p_BNV, keys_BN, guesses)


def run(monkeypatch, prompts, *, seeds, **speculation):
    """What was recorded, and the tokens of each row."""
    with monkeypatch.context() as patching:
        recorder = Recorder(patching)
        speculation |= SPECULATION
        how = settings_of(num_new=40, sampling=SAMPLING, seed=seeds, **speculation)
        return recorder, texts_of(tiny_engine().generate(prompts, **how))


for_every_method = pytest.mark.parametrize(
    "method", ["autoregressive", "naive", "retrieval", "triforce"]
)


@for_every_method
def test_all_numbers_of_a_run_are_distinct(monkeypatch, method):
    """Of all rows, levels and steps; 53 bits make a coincidence a matter of 1 in 10^9 runs."""
    recorder, _ = run(monkeypatch, PROMPTS, seeds=[0, 1, 2], method=method)
    numbers = [n for row in recorder.decisions.values() for numbers in row for n in numbers]
    assert len(set(numbers)) == len(numbers) > 100
    assert all(0 <= number < 1 for number in numbers)
    assert all(number * 2**24 % 1 > 0 for number in numbers)  # a float32 has 24 bits
    assert sum(number * 2**40 % 1 > 0 for number in numbers) > 0.99 * len(numbers)


@for_every_method
def test_a_rows_numbers_do_not_depend_on_its_neighbours(monkeypatch, method):
    """The same decisions alone, between others, and after others have ended."""
    together, tokens = run(monkeypatch, PROMPTS, seeds=[7, 8, 9], method=method)
    for b, prompt in enumerate(PROMPTS):
        alone, own = run(monkeypatch, [prompt], seeds=[7 + b], method=method)
        assert own[0] == tokens[b]
        assert alone.decisions[7 + b] == together.decisions[7 + b]


@for_every_method
def test_coupled_noise_belongs_to_a_seed_and_a_position(monkeypatch, method):
    """All levels that sample for a position of a row use one key; no other place has it."""
    recorder, _ = run(monkeypatch, PROMPTS, seeds=[3, 4, 5], method=method, coupled=True)
    keys = []
    for seed, places in recorder.keys.items():
        start = len(PROMPTS[seed - 3])
        assert set(places) >= set(range(start, start + 40))
        assert all(len(found) == 1 for found in places.values())
        keys += [key for found in places.values() for key in found]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("verification", ["token", "block", None])
def test_runs_verify_as_asked_and_by_block_unless_asked(monkeypatch, verification):
    """At every level: guesses of the drafter and of the retrieval level."""
    asked = {"verification": verification} if verification else {}
    recorder, _ = run(monkeypatch, PROMPTS, seeds=[0, 1, 2], method="triforce", **asked)
    used = recorder.sizes.pop(verification or "block")
    assert {0, 2} <= used
    assert max(used) >= 3
    assert [*recorder.sizes.values()] == [set()]
