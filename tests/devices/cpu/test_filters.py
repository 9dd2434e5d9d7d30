"""The kernel of filters against the distribution by definition, on several instruction sets."""

import itertools
import math

import pytest
import torch

from minitri.core.decoding.sampling import probs_from_logits
from minitri.core.settings import SamplingParams
from minitri.devices.cpu.kernels import load_kernels
from tests.devices.cpu.conftest import compiled
from tests.devices.cpu.test_kernels import random

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")

GREEDY = SamplingParams()
ALL = SamplingParams(0.8, 20, top_p=0.9, min_p=0.01)
every_size = pytest.mark.parametrize("V", [1, 15, 50, 49152])


def rows_of(V: int) -> torch.Tensor:
    """Scores far from 0; many ties; all equal; a trimmed head. Multiples of 1/64: what differs here
    differs by more than a rounding."""
    logits = (3 * random(4, V) * 64).round() / 64
    logits[0] += 1000
    logits[1].clamp_(-1, 1).round_()
    logits[2] = 0.5
    logits[3, 1::2] = -math.inf
    return logits


@every_size
def test_every_combination_of_filters_is_the_distribution_by_definition(kernels, V):
    """From the lowest temperature, where all but the best is 0, to the highest."""
    logits = rows_of(V)
    temperatures = (1e-6, 0.05, 1.0, 3.0, 100.0) if V < 1000 else (0.7, 100.0)
    filters = ((0, 1, 7, 300, 2**31 - 1), (1.0, 0.95, 0.5, 1e-9), (0.0, 1e-50, 0.1, 1.0))
    for numbers in itertools.product(temperatures, *filters):
        params = SamplingParams(*numbers)
        wanted = probs_from_logits(logits.double(), params)
        found = kernels.probs(logits, params).double()
        # What is 2^-126 times as likely as the best, or less, is 0.
        assert torch.allclose(found, wanted, rtol=2e-5, atol=2e-38), params


@pytest.mark.parametrize("places", [[17, 9000, 39999], [0, 1], [39999]])
def test_of_the_likeliest_tokens_greedy_decoding_takes_the_first(kernels, places):
    logits = torch.full((2, 40000), -1.0)
    logits[0, places] = 0.0
    logits[0, places[-1]] = -0.0
    logits[1, places] = 1e38
    assert kernels.probs(logits, GREEDY).nonzero().tolist() == [[0, places[0]], [1, places[0]]]
    assert torch.equal(kernels.probs(logits, GREEDY), probs_from_logits(logits, GREEDY))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0), ALL])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_give_no_distribution(kernels, bad, params):
    """NaN or infinity at any place, or a row of nothing but minus infinity; other rows have one."""
    for place in (0, 7, 16, 49):
        logits = random(2, 50)
        logits[0, place if bad != -math.inf else slice(None)] = bad
        probs = kernels.probs(logits, params)
        assert not probs[0].sum().isfinite()
        assert torch.equal(probs[1:], kernels.probs(logits[1:], params))
        assert probs[1].sum() == pytest.approx(1)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0), ALL])
@every_size
def test_a_row_has_the_same_bits_whatever_stands_next_to_it(kernels, V, params):
    """On one thread or three; also of a part of a vocabulary, after rows of other lengths."""
    logits = 3 * random(7, V + 3)[:, :V]
    together = kernels.probs(logits, params)
    for threads in (1, 3, 2):
        kernels.num_threads = threads
        assert torch.equal(kernels.probs(logits, params), together)
    kernels.probs(random(3, 999) + 50, params)
    for row, probs in zip(logits, together, strict=True):
        assert torch.equal(kernels.probs(row[None], params)[0], probs)


@pytest.mark.parametrize("spoil", [torch.Tensor.bfloat16, torch.Tensor.double, torch.Tensor.ravel])
def test_other_logits_are_refused(kernels, spoil):
    with pytest.raises(ValueError, match="the CPU kernels cannot take"):
        kernels.probs(spoil(random(2, 50)), GREEDY)


MUTANTS = """
mass.sum >= wanted => mass.sum > 2 * wanted
mass.count >= a.top_k => mass.count > a.top_k
std::fill(x + a.V, x + padded, MINUS_INFINITY); => ;
mass.sum += sums[i]; => mass.sum += i ? sums[i] : 0;
if (!any_above(v, below)) continue; => if (!any_above(v, least)) continue;
before = mass; => ;
number >= least && number < above => number >= least
before.count += 1; => ;
before.sum += some.front(); => ;
mass_from(x, n, least).sum; => mass_from(x, n, 0).sum;
least = std::max(least, cutoff( => least = std::min(least, cutoff(
std::max(least, power_of_2( => std::max(0 * least, power_of_2(
(v >= least)) / total => (v > least)) / total
(load(x + i) - top) / => load(x + i) /
/ temperature * LOG2_E => / temperature
float* first = std::find(x, x + n, top); => float* first = x + n; while (*--first != top);
are_nan |= load(x + i) != load(x + i); => ;
!std::isfinite(top) || => std::isnan(top) ||
a.logits + row * a.V, a.logits + (row + 1) * a.V, x) => a.logits, a.logits + a.V, x)
"""
"""Wrong kernels: a text of the source => what stands in its place."""


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS.strip().splitlines())
def test_wrong_kernels_are_noticed(mutant, tmp_path):
    wrong = compiled(tmp_path, change=mutant.split(" => "))
    with pytest.raises(AssertionError):  # noqa: PT012
        for V in (15, 50):
            test_every_combination_of_filters_is_the_distribution_by_definition(wrong, V)
        test_of_the_likeliest_tokens_greedy_decoding_takes_the_first(wrong, [17, 9000, 39999])
        for bad, params in ((math.nan, ALL), (math.inf, GREEDY)):
            test_logits_that_are_not_finite_give_no_distribution(wrong, bad, params)
