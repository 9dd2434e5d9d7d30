"""Filters by bisection equal their definition: the Triton kernel, run by the interpreter on a CPU,
and its twin in PyTorch's operations."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitri.decoding.sampling import probs_from_logits
from minitri.gpu import sampling as gpu_sampling
from minitri.gpu.sampling import largest_error, probs_by_bisection, probs_from_logits_on_device
from minitri.settings import SamplingParams

pytest.importorskip("triton", reason="needs triton, which is made for Linux")

from minitri.gpu.kernels import sampling as kernels

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
MARGIN = 1e-6
"""Float32 probabilities leave open how much mass stands ahead of a token."""


def by_kernel(logits_NV, filters, numbers_3):
    unit = gpu_sampling.unit_of_mass(logits_NV.shape[1])
    return kernels.filter_rows(logits_NV, filters, numbers_3, unit)


WAYS = [probs_by_bisection, by_kernel]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """A row of some hundred tokens is several tiles."""
    monkeypatch.setattr(kernels, "BLOCK", 64)


def probs(way, logits_NV, params, form=None):
    numbers = torch.tensor(params.numbers, dtype=torch.float64, device=DEVICE)
    return way(logits_NV.to(DEVICE), form or params, numbers).cpu()


def kept_by_definition(logits_V, params, top_p) -> set[int]:
    """The tokens that filters keep, in float64, from float32 scores."""
    scores = ((logits_V - logits_V.max()) / params.temperature).double()
    keep = torch.ones_like(scores, dtype=torch.bool)
    if 0 < params.top_k < len(scores):
        keep = scores >= scores.sort(descending=True).values[params.top_k - 1]
    if params.top_p < 1:
        masses = scores.exp() * keep
        order = masses.argsort(descending=True)
        falling = masses[order] / masses.sum()
        ahead = falling.cumsum(0) - falling
        least = scores[order[int((ahead < top_p).sum().clamp_min(1)) - 1]]
        keep &= scores >= least
    if params.min_p:
        keep &= (scores >= torch.tensor(params.numbers[2]).float()) | (scores == 0)
    return set(keep.nonzero().flatten().tolist())


@st.composite
def cases(draw):
    V = draw(st.sampled_from([1, 2, 7, 63, 64, 65, 300]))
    seed, spread = draw(st.integers(0, 999)), draw(st.sampled_from([0.0, 0.3, 3.0, 30.0]))
    logits_V = spread * torch.randn(V, generator=torch.Generator().manual_seed(seed))
    if draw(st.booleans()):
        logits_V = logits_V.round()  # ties
    if V > 2 and draw(st.booleans()):
        logits_V[::2] = -math.inf  # tokens that a drafter does not know
    params = SamplingParams(
        draw(st.sampled_from([1e-6, 0.6, 1.0, 50.0])),
        draw(st.sampled_from([0, 1, 2, 20, 64, 10_000])),
        draw(st.sampled_from([1.0, 1 - 1e-9, 0.999, 0.9, 0.5, 1e-3, 1e-50])),
        draw(st.sampled_from([0.0, 0.05, 1.0])),
    )
    return logits_V, params


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=cases())
def test_the_tokens_that_are_kept_are_those_of_the_definition(way, case):
    """Ties, flat rows, one token, rows that end within a tile, top-p next to 0 and to 1; tokens
    alike are kept or dropped together."""
    logits_V, params = case
    found_V = probs(way, logits_V[None], params)[0]
    found = set(found_V.nonzero().flatten().tolist())
    fewest, most = (
        {token for token in kept_by_definition(logits_V, params, params.top_p + margin)
         if (logits_V[token] - logits_V.max()) / params.temperature > -80}
        for margin in (-MARGIN, MARGIN)
    )  # fmt: skip
    assert fewest <= found <= kept_by_definition(logits_V, params, params.top_p + MARGIN)
    assert found_V.sum() == pytest.approx(1, abs=1e-5)
    for value in logits_V[sorted(found)].unique():
        assert found.issuperset((logits_V == value).nonzero().flatten().tolist())
    if fewest == most == found:
        assert (found_V - probs_from_logits(logits_V[None], params)[0]).abs().max() < 1e-6


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("top_p", [0.9, 0.999999])
def test_a_large_vocabulary_in_any_order_has_the_same_tokens(way, top_p, monkeypatch):
    """128,256 tokens, the last tile not full: what is kept does not depend on where tokens stand,
    and equals what a sort finds."""
    monkeypatch.setattr(kernels, "BLOCK", 8192)
    generator = torch.Generator().manual_seed(4)
    logits_NV = 2.5 * torch.randn(1, 128_256, generator=generator)
    order = torch.randperm(128_256, generator=generator)
    params = SamplingParams(0.8, top_p=top_p)
    found, moved = probs(way, logits_NV, params), probs(way, logits_NV[:, order], params)
    assert torch.equal(found[:, order] > 0, moved > 0)
    exact = probs_from_logits(logits_NV.double(), params)
    assert (found - exact).abs().max() < 1e-6
    other_NV = (found > 0) != (exact > 0)
    assert (exact + found)[other_NV].sum() < 1e-7  # what float32 leaves open
    assert top_p > 0.9 or not other_NV.any()


@pytest.mark.parametrize("way", WAYS)
def test_temperature_0_is_one_hot_whatever_the_form(way):
    """Of equal tokens the one of the lowest id, in another tile than the others, too."""
    logits_NV = torch.zeros(3, 200)
    logits_NV[1, [70, 150, 199]] = 2.5
    logits_NV[2, 199] = 1e-30
    form = SamplingParams(0.7, 5, top_p=0.9, min_p=0.1)
    assert probs(way, logits_NV, SamplingParams(), form).nonzero().tolist() == [
        [0, 0],
        [1, 70],
        [2, 199],
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wanted", [SamplingParams(), SamplingParams(0.8, 5, top_p=0.9, min_p=0.1)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's
def test_logits_that_are_not_finite_give_no_distribution(way, wanted, bad):
    logits_NV = torch.randn(3, 150, generator=torch.Generator().manual_seed(1))
    logits_NV[0, 70] = bad
    logits_NV[2] = -math.inf
    found = probs(way, logits_NV, wanted, SamplingParams(0.7, 5, top_p=0.8, min_p=0.3))
    assert not found[0].sum().isfinite()
    assert not found[2].sum().isfinite()
    assert found[1].sum() == pytest.approx(1)


@pytest.mark.parametrize("way", WAYS)
def test_a_part_of_each_row_is_read_where_it_lies(way):
    wide_NV = torch.randn(4, 130, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(0.9, 20, top_p=0.8)
    wide_NV[:, 100:] = 50.0
    assert torch.equal(
        probs(way, wide_NV[:, :100], params), probs(way, wide_NV[:, :100].clone(), params)
    )


def test_the_kernel_passes_the_test_before_its_use(monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 8192)
    assert largest_error(DEVICE) < gpu_sampling.TOLERANCE
    assert gpu_sampling.has_kernel(DEVICE) == ON_GPU


def test_where_the_kernel_works_it_is_asked(monkeypatch):
    monkeypatch.setattr(gpu_sampling, "has_kernel", lambda device: True)
    monkeypatch.setattr(gpu_sampling, "probs_by_bisection", None)
    found = probs(probs_from_logits_on_device, torch.tensor([[0.0, 1.0]]), SamplingParams(1.0))
    assert found[0, 1] == pytest.approx(1 / (1 + math.exp(-1)))
