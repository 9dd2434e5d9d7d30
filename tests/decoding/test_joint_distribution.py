"""The joint distribution of several tokens through the real session, for every method.

An adversarial drafter, a retrieval cache of a quarter of the prompt, and 20,000 seeds. A false
alarm has odds of 1 in 100,000 per test, had the seeds been drawn anew. A distribution of texts that
is 4 % away from the target's (total variation) is found with odds of 99 %: `smallest_distance`.
With 5,000 seeds, where only gammas or randomness differ, one that is 8 % away. `pytest -s` prints
the p-values.
"""

import functools

import numpy
import pytest
import torch

from minitri import SamplingParams, SpeculationConfig
from minitri.decoding import random_source
from minitri.stats import Stats
from tests.chi_square import (
    FALSE_ALARM,
    ROWS,
    SMALL,
    costs_that_change,
    count_texts,
    exact_probs,
    other_model,
    p_value,
    reuse_number,
    smallest_distance,
    target_model,
)

NUM_SEEDS, SHORT = 20_000, {"gamma1": 1, "gamma2": 2, **SMALL}
FILTERED, OTHERWISE = SamplingParams(0.8, top_p=0.95), SamplingParams(1.1, top_k=3, min_p=0.02)
CASES = {
    "autoregressive": (FILTERED, SpeculationConfig("autoregressive")),
    "naive": (FILTERED, SpeculationConfig("naive", **SHORT)),
    "retrieval": (FILTERED, SpeculationConfig("retrieval", **SHORT)),
    "triforce": (FILTERED, SpeculationConfig("triforce", **SHORT)),
    "auto": (FILTERED, SpeculationConfig("auto", **SHORT)),
    "n-grams": (OTHERWISE, SpeculationConfig("triforce", **SHORT)),
    "longer guesses": (OTHERWISE, SpeculationConfig("triforce", gamma1=2, gamma2=2, **SMALL)),
    "by token": (
        OTHERWISE,
        SpeculationConfig("triforce", gamma1=2, gamma2=2, verification="token", **SMALL),
    ),
    "tree": (FILTERED, SpeculationConfig("naive", gamma1=2, tree="4", **SMALL)),
    "tree below": (OTHERWISE, SpeculationConfig("triforce", gamma2=2, tree="2x2", **SMALL)),
    "coupled tree": (OTHERWISE, SpeculationConfig("naive", coupled=True, tree="2x2", **SMALL)),
    "coupled": (OTHERWISE, SpeculationConfig("triforce", coupled=True, **SHORT)),
}


@pytest.fixture(scope="module")
def texts_of():
    """`count_texts` for one of the cases; what two tests need is run once."""

    @functools.cache
    def texts(case: str) -> tuple[torch.Tensor, list[Stats]]:
        sampling, speculation = CASES[case]
        draft = None if case == "n-grams" else other_model()
        num_seeds = NUM_SEEDS if sampling == FILTERED else NUM_SEEDS // 4
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr("minitri.stack.prior_seconds", costs_that_change)
            return count_texts(target_model(), draft, sampling, speculation, num_seeds)

    return texts


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_three_tokens_follow_the_joint_distribution(case, texts_of):
    probs = exact_probs(target_model(), CASES[case][0])
    counts, runs = texts_of(case)
    num_seeds, found = int(counts.sum()), p_value(counts.sum(0), probs)
    print(f"\n  {case}: p-value {found:.3g} over {num_seeds} seeds")
    assert smallest_distance(probs, num_seeds) < 0.04 * (NUM_SEEDS / num_seeds) ** 0.5
    assert all(0.1 < rate < 0.9 for rate in acceptance_rates(runs))
    plans = {plan for run in runs for plan in run.steps_per_plan}
    assert len(plans) == (4 if case == "auto" else 1)
    assert found > FALSE_ALARM


def acceptance_rates(runs: list[Stats]) -> list[float]:
    """Of each stage's tests: speculation that is always right, or always wrong, shows little."""
    stages = zip(*(run.stages for run in runs), strict=True)
    totals = [
        (sum(run.num_accepted_tokens for run in stage), sum(run.num_tested_tokens for run in stage))
        for stage in stages
    ]
    return [accepted / tested for accepted, tested in totals if tested]


@pytest.mark.slow
def test_a_number_that_is_used_twice_shows(texts_of, monkeypatch, capsys):
    """The number of the last test decides about the recovered or bonus token, too: a bug that
    leaves every single number uniform."""
    target, draft, rows = target_model(), other_model(), []
    probs = exact_probs(target, FILTERED)
    methods = ("naive", "retrieval", "triforce")
    of_real_code = [texts_of(method)[0][: 4000 // ROWS] for method in methods]
    monkeypatch.setattr(random_source, "verify_block", reuse_number)
    for method, real in zip(methods, of_real_code, strict=True):
        with monkeypatch.context() as patching:
            patching.setattr(random_source, "verify_block", reuse_number)
            reused, _ = count_texts(target, draft, *CASES[method], 4000)
        assert real.sum() == reused.sum() == 4000
        rows.append((method, *(p_value(texts.sum(0), probs) for texts in (real, reused))))
    with capsys.disabled():
        print(f"\n  {'p-values, 4,000 seeds':24s} {'real code':>10s} {'number reused':>14s}")
        for method, real, reused in rows:
            print(f"  {method:24s} {real:10.2g} {reused:14.2g}")
    assert all(real > FALSE_ALARM for _, real, _ in rows)
    assert all(reused < 1e-20 for _, _, reused in rows)


def test_the_chi_square_test_has_the_power_that_it_claims():
    """500 samples of a distribution at the stated distance, of the shape that is hardest to find
    (every text wrong by the same part of itself): 99 % are found, and of the true one none."""
    probs = exact_probs(target_model(), FILTERED)
    distance = smallest_distance(probs, NUM_SEEDS)
    generator = numpy.random.default_rng(0)
    signs = torch.ones(probs.numel(), dtype=torch.float64)
    order = torch.from_numpy(generator.permutation(probs.numel()))
    is_in_the_first_half = probs.flatten()[order].cumsum(0) < 0.5
    signs[order[is_in_the_first_half]] = -1
    wrong = probs * (1 + 2 * distance * signs.view_as(probs))
    wrong /= wrong.sum()
    found = []
    for source in (probs, wrong):
        samples = generator.multinomial(NUM_SEEDS, source.flatten().numpy(), size=500)
        texts = torch.from_numpy(samples).double().view(500, *probs.shape)
        found.append(sum(p_value(counts, probs) < FALSE_ALARM for counts in texts))
    assert found[0] == 0
    assert found[1] > 0.975 * 500
