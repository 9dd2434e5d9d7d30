"""Noise tied to seed and position: fine enough, never used twice, and of the right distribution."""

import torch

from minitri.core.decoding.sampling import gumbel_argmax, hashed_uniforms, noise_keys, splitmix
from tests.core.exactness import FALSE_ALARM, p_value

STEP = 0x9E3779B97F4A7C15 - 2**64
"""Of SplitMix64: what it adds to its state, as an int64."""


def test_gumbel_noise_is_of_fine_numbers_that_differ():
    """Of 100,000 numbers of 24 bits about 300 repeat; of 52 bits, with one seed in a million."""
    keys = noise_keys(0, torch.arange(100))
    uniforms = hashed_uniforms(keys.repeat_interleave(1000), torch.arange(1000).repeat(100))
    assert uniforms.dtype == torch.float64
    assert len(uniforms.unique()) == 100_000
    assert 0 < uniforms.min() < 1e-4
    assert 1 - 1e-4 < uniforms.max() < 1
    [least] = hashed_uniforms(torch.tensor([-STEP]), torch.tensor([0])).tolist()
    assert least == 2**-53  # of a hash of 0: never 0 itself, whose logarithm is infinite


def test_the_hash_is_splitmix64():
    """The published outputs for the seeds 1234567 and 0: the text of a seed may not change."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = 1234567 + torch.arange(3) * STEP
    assert [number % 2**64 for number in splitmix(states).tolist()] == published
    first = splitmix(torch.tensor(0))
    assert int(first) % 2**64 == 0xE220A8397B1DCDAF
    assert noise_keys(0, torch.tensor(1)) == splitmix(first + 1)
    uniforms = hashed_uniforms(torch.tensor([1234567] * 3), torch.arange(3)).tolist()
    assert [int(number * 2**52) for number in uniforms] == [x >> 12 for x in published]


def test_no_seed_repeats_the_noise_of_another_at_another_position():
    keys = torch.stack([noise_keys(seed, torch.arange(100)) for seed in range(100)])
    assert len(keys.unique()) == 10_000


def test_coupled_tokens_follow_the_distribution_at_every_position():
    """Tokens of 20,000 positions are counted, for a distribution without symmetry."""
    probs = torch.tensor([0.6, 0.25, 0.1, 0.05], dtype=torch.float64)
    keys = noise_keys(1, torch.arange(20_000))
    tokens = gumbel_argmax(probs.expand(20_000, -1), keys)
    assert p_value(tokens.bincount(minlength=4), probs) > FALSE_ALARM
