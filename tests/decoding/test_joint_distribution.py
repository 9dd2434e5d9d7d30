"""The joint distribution of several tokens through the real session, for every method.

An adversarial drafter, and 20,000 seeds. A false alarm has odds of 1 in 100,000 per test, had the
seeds been drawn anew; probabilities that are off by 8 % (root mean square, relative) are found with
odds of 99 %: `smallest_error`. With 5,000 seeds, where only gammas or randomness differ, those that
are off by 16 %. `pytest -s` prints the p-values.
"""

from __future__ import annotations

import pytest

from minitri import SamplingParams, SpeculationConfig
from minitri.decoding import random_source
from tests.chi_square import (
    FALSE_ALARM,
    SMALL,
    count_texts,
    exact_probs,
    other_model,
    p_value,
    reuse_number,
    smallest_error,
    target_model,
)

NUM_SEEDS = 20_000
FILTERED, OTHERWISE = SamplingParams(0.8, top_p=0.95), SamplingParams(1.1, top_k=3, min_p=0.02)
CASES = {
    "autoregressive": (FILTERED, SpeculationConfig("autoregressive")),
    "naive": (FILTERED, SpeculationConfig("naive", gamma1=1, gamma2=2, **SMALL)),
    "retrieval": (FILTERED, SpeculationConfig("retrieval", gamma1=1, gamma2=2, **SMALL)),
    "triforce": (FILTERED, SpeculationConfig("triforce", gamma1=1, gamma2=2, **SMALL)),
    "auto": (FILTERED, SpeculationConfig("auto", **SMALL)),
    "longer guesses": (OTHERWISE, SpeculationConfig("triforce", gamma1=2, gamma2=2, **SMALL)),
    "coupled": (OTHERWISE, SpeculationConfig("triforce", gamma1=2, coupled=True, **SMALL)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_three_tokens_follow_the_joint_distribution(case):
    sampling, speculation = CASES[case]
    target = target_model()
    probs = exact_probs(target, sampling)
    num_seeds = NUM_SEEDS if sampling == FILTERED else NUM_SEEDS // 4
    assert smallest_error(probs, num_seeds) < 0.08 * (NUM_SEEDS / num_seeds) ** 0.5
    found = p_value(count_texts(target, other_model(), sampling, speculation, num_seeds), probs)
    print(f"\n  {case}: p-value {found:.3g} over {num_seeds} seeds")
    assert found > FALSE_ALARM


@pytest.mark.slow
def test_a_number_that_is_used_twice_shows(monkeypatch, capsys):
    """The number of the last test decides about the recovered or bonus token, too: a bug that
    leaves every single number uniform."""
    target, draft = target_model(), other_model()
    probs, rows = exact_probs(target, FILTERED), []
    for method in ("naive", "retrieval", "triforce"):
        speculation = SpeculationConfig(method, gamma1=1, gamma2=2, **SMALL)
        counts = []
        for verify in (random_source.verify, reuse_number):
            with monkeypatch.context() as patching:
                patching.setattr(random_source, "verify", verify)
                counts.append(count_texts(target, draft, FILTERED, speculation, 4000))
        rows.append((method, *(p_value(texts, probs) for texts in counts)))
    with capsys.disabled():
        print(f"\n  {'p-values, 4,000 seeds':24s} {'real code':>10s} {'number reused':>14s}")
        for method, real, reused in rows:
            print(f"  {method:24s} {real:10.2g} {reused:14.2g}")
    assert all(real > FALSE_ALARM for _, real, _ in rows)
    assert all(reused < 1e-20 for _, _, reused in rows)
