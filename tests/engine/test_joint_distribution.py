"""The joint distribution of several tokens through the real session: greedy and coupled runs cannot
see a wrong q.

An adversarial drafter, a retrieval cache of a quarter of the prompt, and 4,000 seeds. A false alarm
has odds of 1 in 100,000 per test, had the seeds been drawn again.
"""

import pytest

from minitri import SamplingParams, SpeculationConfig
from tests.chi_square import (
    SMALL,
    V,
    costs_that_change,
    count_texts,
    exact_probs,
    other_model,
    target_model,
)
from tests.core.rigs import trimmed_copy
from tests.core.statistics import FALSE_ALARM, p_value

FILTERED, OTHERWISE = SamplingParams(0.8, top_p=0.95), SamplingParams(1.1, top_k=3, min_p=0.02)


class Biased:
    """A drafter from outside that is sure of a wrong token, whatever the filters."""

    def guess(self, tokens: list[int], row: int) -> list[float]:
        return [0.625 if token == tokens[-1] else 0.125 for token in range(V)]


DRAFTERS = {
    "half of the tokens": lambda target: other_model(V // 2),
    "three times as many": lambda target: other_model(3 * V),
    "trimmed head": lambda target: trimmed_copy(other_model(), [2, 0]),
    "lookup": lambda target: None,
    "plug-in": lambda target: Biased(),
}


def case(sampling, method, drafter="", gamma1=1, **settings):
    """The filters, the drafter, and how it is used."""
    settings = {"gamma1": gamma1, "gamma2": 2, **SMALL, **settings}
    return sampling, drafter, SpeculationConfig(method, **settings)


NUM_SEEDS = 4_000
METHODS = "autoregressive", "retrieval", "triforce", "auto"
CASES = {method: case(FILTERED, method) for method in METHODS}
CASES |= {f"{drafter}, naive": case(OTHERWISE, "naive", drafter, 2) for drafter in DRAFTERS}
CASES |= {
    "trimmed head, triforce": case(OTHERWISE, "triforce", "trimmed head", 2),
    "lookup, auto": case(OTHERWISE, "auto", "lookup", 2),
    "longer guesses": case(OTHERWISE, "triforce", gamma1=2),
    "coupled": case(OTHERWISE, "autoregressive", coupled=True),  # as all: `tests/test_matrix.py`
    "tree": case(FILTERED, "naive", gamma1=2, tree="4"),
    "tree below": case(OTHERWISE, "triforce", gamma1=None, tree="2x2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_three_tokens_follow_the_joint_distribution(case, monkeypatch):
    sampling, drafter, speculation = CASES[case]
    target = target_model()
    draft = DRAFTERS[drafter](target) if drafter else other_model()
    probs = exact_probs(target, sampling)
    monkeypatch.setattr("minitri.core.stack.Stack.prior_seconds", costs_that_change)
    counts, runs = count_texts(target, draft, sampling, speculation, NUM_SEEDS)
    found = p_value(counts, probs)
    print(f"\n  {case}: p-value {found:.3g} over {NUM_SEEDS} seeds")
    # Speculation that is always right, or always wrong, shows little.
    for stage in zip(*(run.stages for run in runs), strict=True):
        accepted = sum(run.num_accepted_tokens for run in stage)
        tested = sum(run.num_tested_tokens for run in stage)
        assert not tested or accepted > 100
        assert not tested or drafter or 0.1 < accepted / tested < 0.9
    plans = {plan for run in runs for plan in run.steps_per_plan}
    assert len(plans) == (4 if speculation.method == "auto" else 1)
    assert found > FALSE_ALARM
