"""The random numbers of real runs: every decision of every level, row and step has its own."""

import pytest
import torch

from minitri import SamplingParams
from minitri.core.decoding.noise import noise_keys
from minitri.core.decoding.random_source import CoupledSource, IndependentSource
from tests.cascades import settings_of, texts_of, tiny_engine

PROMPTS = [[5, 6, 7, 8] * 10, [9, 10, 11], list(range(20, 90))]
SIZES = {"gamma1": 2, "gamma2": 3, "budget": 24, "num_recent_tokens": 20}
METHODS = ["autoregressive", "naive", "triforce"]


def run(method: str, **speculation) -> list[tuple[int, ...]]:
    """The texts of all prompts; row b has the seed b."""
    sampling = SamplingParams(1.1, top_p=0.95)
    how = settings_of(method, 40, sampling, **SIZES, **speculation)
    return texts_of(tiny_engine().generate(PROMPTS, **how))


def record(monkeypatch, kind) -> list:
    """Fills up with the numbers that active rows draw: each one's first position and numbers."""
    decisions, real = [], kind.numbers

    def noted(source, counts, starts, active):
        numbers_BN = real(source, counts, starts, active)
        for b, n in enumerate(counts):
            if active[b]:
                places = [*range(n), -1] if kind is IndependentSource else range(n + 1)
                decisions.append((starts[b], numbers_BN[b, list(places)]))
        return numbers_BN

    monkeypatch.setattr(kind, "numbers", noted)
    return decisions


@pytest.mark.parametrize("method", METHODS)
def test_all_numbers_of_a_run_are_distinct(monkeypatch, method):
    """Of all rows, levels and steps; 53 bits make a coincidence a matter of 1 in 10^9 runs."""
    decisions = record(monkeypatch, IndependentSource)
    run(method)
    assert all(uniforms_N.dtype == torch.float64 for _, uniforms_N in decisions)
    numbers = [number for _, uniforms_N in decisions for number in uniforms_N.tolist()]
    assert len(set(numbers)) == len(numbers) > 100
    assert all(0 <= number < 1 for number in numbers)
    assert all(number * 2**24 % 1 > 0 for number in numbers)  # a float32 has 24 bits
    assert sum(number * 2**40 % 1 > 0 for number in numbers) > 0.99 * len(numbers)


@pytest.mark.parametrize("method", METHODS)
def test_coupled_noise_belongs_to_a_seed_and_a_position(monkeypatch, method):
    """All levels that sample for a position of a row use one key."""
    decisions = record(monkeypatch, CoupledSource)
    run(method, coupled=True)
    drawn = {(start + i, int(key)) for start, keys in decisions for i, key in enumerate(keys)}
    for seed, prompt in enumerate(PROMPTS):
        positions = range(len(prompt), len(prompt) + 50)
        keys = noise_keys(seed, torch.tensor(positions)).tolist()
        own = set(zip(positions, keys, strict=True))
        assert len(drawn & own) >= 40
        drawn -= own
    assert drawn == set()


def test_runs_verify_as_asked_and_by_block_unless_asked():
    by_block = run("triforce", verification="block")
    assert run("triforce") == by_block
    assert run("triforce", verification="token") != by_block
