"""The random numbers of real runs: every decision of every level, row and step has its own."""

import pytest
import torch

from minitri import SamplingParams
from minitri.core.decoding.random_source import CoupledSource, IndependentSource
from minitri.core.decoding.sampling import noise_keys
from tests.conftest import settings_of, texts_of, tiny_engine

PROMPTS = [[5, 6, 7, 8] * 10, [9, 10, 11], list(range(20, 90))]
SIZES = {"gamma1": 2, "gamma2": 3, "budget": 24, "num_recent_tokens": 20}
METHODS = [{"method": "autoregressive"}, {"method": "naive", "tree": "5"}, {"method": "triforce"}]


def run(**speculation) -> list[tuple[int, ...]]:
    """The texts of all prompts; row b has the seed b."""
    how = settings_of(num_new=40, sampling=SamplingParams(1.1, top_p=0.95), **SIZES, **speculation)
    return texts_of(tiny_engine().generate(PROMPTS, **how))


def record(monkeypatch, kind, name) -> list:
    """Fills up with what is asked of a source for a row, and its numbers."""
    calls, real = [], getattr(kind, name)

    def noted(source, b, asked):
        calls.append((asked, real(source, b, asked)))
        return calls[-1][1]

    monkeypatch.setattr(kind, name, noted)
    return calls


@pytest.mark.parametrize("speculation", METHODS)
def test_all_numbers_of_a_run_are_distinct(monkeypatch, speculation):
    """All rows, levels and steps count; 53 bits make a coincidence a matter of 1 in 10^9 runs."""
    calls = record(monkeypatch, IndependentSource, "uniforms")
    run(**speculation)
    drawn = torch.cat([numbers for _, numbers in calls])
    assert drawn.dtype == torch.float64
    assert len(drawn.unique()) == len(drawn) > 100
    assert 0 <= drawn.min() < drawn.max() < 1
    assert (drawn * 2**24 % 1 > 0).all()  # a float32 has 24 bits
    assert (drawn * 2**40 % 1 > 0).sum() > 0.99 * len(drawn)


@pytest.mark.parametrize("speculation", METHODS)
def test_coupled_noise_belongs_to_a_seed_and_a_position(monkeypatch, speculation):
    """All levels that sample for a position of a row use one key."""
    calls = record(monkeypatch, CoupledSource, "keys")
    run(coupled=True, **speculation)
    pairs = [torch.stack((positions.flatten(), keys.flatten()), 1) for positions, keys in calls]
    drawn = {(position, key) for position, key in torch.cat(pairs).tolist()}
    for seed, prompt in enumerate(PROMPTS):
        positions = range(len(prompt), len(prompt) + 50)
        keys = noise_keys(seed, torch.tensor(positions)).tolist()
        own = set(zip(positions, keys, strict=True))
        assert len(drawn & own) >= 40
        drawn -= own
    assert drawn == set()


def test_runs_verify_as_asked_and_by_block_unless_asked():
    by_block, by_token, unasked = (
        run(method="triforce", **asked)
        for asked in ({"verification": "block"}, {"verification": "token"}, {})
    )
    assert by_token != unasked == by_block
