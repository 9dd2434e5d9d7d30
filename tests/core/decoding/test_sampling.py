"""Distributions and samples: every filter against a plain definition, ties, temperature 0."""

import math

import pytest
import torch

from minitri.core.decoding.sampling import (
    probs_by_tensor,
    probs_from_logits,
    running_sums,
    sample,
    sums_by_parts,
)
from minitri.core.settings import SamplingParams


def by_definition(logits: list[float], params: SamplingParams) -> list[float]:
    """The distribution by the book, one token at a time, in Python floats."""
    weights = [math.exp((x - max(logits)) / params.temperature) for x in logits]
    keep = set(range(len(logits)))
    order = sorted(keep, key=lambda i: -weights[i])
    if params.top_k:
        border = weights[order[min(params.top_k, len(order)) - 1]]
        keep = {i for i in keep if weights[i] >= border}
    if params.top_p < 1:
        total, mass, border = sum(weights[i] for i in keep), 0.0, 0.0
        for i in order:
            if i in keep and mass < params.top_p:
                mass, border = mass + weights[i] / total, weights[i]
        keep = {i for i in keep if weights[i] >= border}
    if params.min_p:
        keep = {i for i in keep if weights[i] >= params.min_p * max(weights)}
    total = sum(weights[i] for i in keep)
    return [weights[i] / total if i in keep else 0.0 for i in range(len(logits))]


def random_logits(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("temperature", [0.2, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_every_combination_of_filters_is_the_distribution_by_definition(
    temperature, top_k, top_p, min_p
):
    """Settings may be tensors, too, as in a captured step that was made for others."""
    params = SamplingParams(temperature, top_k, top_p, min_p)
    logits = 3 * random_logits(4, 50, dtype=torch.float64)
    rows = [by_definition(row, params) for row in logits.tolist()]
    wanted = torch.tensor(rows, dtype=torch.float64)
    assert (probs_from_logits(logits, params) - wanted).abs().max() < 1e-12
    others = SamplingParams(0.7, top_k, 0.8 if top_p < 1 else 1.0, 0.3 * bool(min_p))
    sampling = (params, SamplingParams(), SamplingParams(0, top_p=0.4))  # of three rows of a batch
    numbers_B3 = torch.tensor([own.numbers for own in sampling], dtype=torch.float64)
    row = logits.float()
    found = probs_by_tensor(row.expand(3, 4, 50), others, numbers_B3)
    assert torch.equal(found, torch.stack([probs_from_logits(row, own) for own in sampling]))


@pytest.mark.parametrize("wanted", [SamplingParams(), SamplingParams(0.8, 5, top_p=0.9, min_p=0.1)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_give_no_distribution(bad, wanted):
    logits = random_logits(2, 50)
    logits[0, 7] = bad
    numbers_B3 = torch.tensor([wanted.numbers], dtype=torch.float64)
    form = SamplingParams(0.7, 5, top_p=0.8, min_p=0.3)
    [by_tensor] = probs_by_tensor(logits.unsqueeze(0), form, numbers_B3)
    for probs in (by_tensor, probs_from_logits(logits, wanted)):
        assert not probs[0].sum().isfinite()
        assert probs[1].sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("logits", "params", "kept"),
    [
        ([0.1, 5.0, 4.999], SamplingParams(0.0), [1]),
        ([*range(17), *[20.0] * 40_000], SamplingParams(0.0), [17]),
        ([1e4, 1e4 - 1, -1e4], SamplingParams(1e-6), [0]),
        ([1.0, 3.0, 2.0], SamplingParams(1.0, top_p=1e-50), [1]),
        ([2.0, 1.0, 1.0, 1.0, 0.0], SamplingParams(1.0, top_k=2), [0, 1, 2, 3]),
        ([2.0, 1.0, 1.0, 1.0, 0.0], SamplingParams(1.0, top_p=0.6), [0, 1, 2, 3]),
        ([0.0, -math.log(2), -1.0], SamplingParams(1.0, min_p=0.5), [0, 1]),
    ],
)
def test_what_is_kept_at_the_extremes_and_of_ties_at_a_border(logits, params, kept):
    """In a captured step as alone: a border is rounded to the type of the logits in both."""
    [probs] = probs_from_logits(torch.tensor([logits]), params)
    assert probs.nonzero().flatten().tolist() == kept
    assert probs.sum() == pytest.approx(1)
    numbers_B3 = torch.tensor([params.numbers], dtype=torch.float64)
    assert torch.equal(probs_by_tensor(torch.tensor([[logits]]), params, numbers_B3)[0, 0], probs)


def test_top_p_looks_further_when_its_first_tokens_do_not_reach_the_mass(monkeypatch):
    logits = random_logits(3, 400)
    logits[0, 0] = 20.0  # one row is done at once, the others are not
    params = SamplingParams(1.5, top_p=0.9)
    whole = probs_from_logits(logits, params)
    monkeypatch.setattr("minitri.core.decoding.sampling.TOP_P_PREFIXES", (4, 8))
    assert torch.equal(probs_from_logits(logits, params), whole)


def test_a_token_of_probability_zero_is_never_drawn():
    distribution = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).repeat(4, 1)
    edges = torch.tensor([0.0, 0.5 - 2**-53, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert sample(distribution, edges).tolist() == [1, 1, 3, 3]
    assert sample(torch.zeros(4, 5), edges).tolist() == [4] * 4  # of a row that has ended: a token


@pytest.mark.parametrize("V", [1, 127, 128, 129, 1000])
def test_sums_by_parts_are_the_sums_of_whole_rows(V):
    """Rows of float32 are added up in float64, by parts as on a GPU."""
    probs = torch.rand(2, 3, V, generator=torch.Generator().manual_seed(V))
    assert torch.allclose(sums_by_parts(probs), running_sums(probs), rtol=1e-15, atol=0)
