"""The kernel of filters against the distribution by definition, on several instruction sets."""

import itertools
import math

import pytest
import torch

from minitri.core.decoding.sampling import probs_from_logits
from minitri.core.settings import SamplingParams
from tests.core.rigs import GREEDY
from tests.devices.cpu.test_kernels import random

ALL = SamplingParams(0.8, 20, top_p=0.9, min_p=0.01)
every_size = pytest.mark.parametrize("V", [1, 15, 50, 20000])


@every_size
def test_every_combination_of_filters_is_the_distribution_by_definition(kernels, V):
    """Temperatures go from the lowest, where all but the best is 0, to the highest. Scores are far
    from 0, ties, all equal, and those of a trimmed head; multiples of 1/64, unlike roundings."""
    logits = (3 * random(4, V) * 64).round() / 64
    logits[0] += 1000
    logits[1].clamp_(-1, 1).round_()
    logits[2] = 0.5
    logits[3, 1::2] = -math.inf
    temperatures = (1e-6, 0.05, 1.0, 3.0, 100.0) if V < 1000 else (0.7, 100.0)
    filters = ((0, 1, 7, 300, 2**31 - 1), (1.0, 0.95, 0.5, 1e-9), (0.0, 1e-50, 0.1, 1.0))
    for numbers in itertools.product(temperatures, *filters):
        params = SamplingParams(*numbers)
        wanted = probs_from_logits(logits.double(), params)
        found = kernels.probs(logits, params).double()
        # What is 2^-126 times as likely as the best, or less, is 0.
        assert torch.allclose(found, wanted, rtol=2e-5, atol=2e-38), params


def test_of_the_likeliest_tokens_greedy_decoding_takes_the_first(kernels):
    for first, *others in ([17, 9000, 39999], [0, 1], [39999]):
        logits = torch.full((2, 40000), -1.0)
        logits[0, [first, *others]] = 0.0
        logits[0, [first, *others][-1]] = -0.0
        logits[1, [first, *others]] = 1e38
        assert kernels.probs(logits, GREEDY).nonzero().tolist() == [[0, first], [1, first]]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0), ALL])
def test_logits_that_are_not_finite_give_no_distribution(kernels, params):
    """NaN or infinity at any place, or a row of nothing but minus infinity; other rows have one."""
    bad_places = itertools.product((math.nan, math.inf), (0, 7, 16, 49))
    for bad, place in [*bad_places, (-math.inf, slice(None))]:
        logits = random(2, 50)
        logits[0, place] = bad
        probs = kernels.probs(logits, params)
        assert not probs[0].sum().isfinite()
        assert torch.equal(probs[1:], kernels.probs(logits[1:], params))
        assert probs[1].sum() == pytest.approx(1)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0), ALL])
@every_size
def test_a_row_has_the_same_bits_whatever_stands_next_to_it(kernels, V, params):
    """Threads are one to three; rows may be parts of a vocabulary, after rows of other lengths."""
    logits = 3 * random(7, V + 3)[:, :V]
    together = kernels.probs(logits, params)
    for threads in (1, 3, 2):
        kernels.num_threads = threads
        assert torch.equal(kernels.probs(logits, params), together)
    kernels.probs(random(3, 999) + 50, params)
    for row, probs in zip(logits, together, strict=True):
        assert torch.equal(kernels.probs(row[None], params)[0], probs)
