"""The autotuner finds the fastest plan, tries again what it misjudged, and wastes little on it."""

import pytest

from minitri.core.decoding.autotuner import FIRST_RATES, HYSTERESIS, Autotuner, expected_tokens
from minitri.core.settings import SpeculationConfig, StepPlan

AR, NAIVE = StepPlan("autoregressive"), StepPlan("naive", 2)
TRIFORCE = StepPlan("triforce", 1, 2)
PLANS = SpeculationConfig().plans
COSTS = {"draft": 0.004, "retrieval": 0.030, "target": 0.100}
SLOPE = 0.04


def predictor_of(costs: dict[str, float], slope: float = SLOPE):
    return lambda stage, num_guesses: costs[stage] * (1 + slope * num_guesses)


def tuner_after(costs, rates, plans=PLANS, *, predicted=COSTS, use_clock=True) -> Autotuner:
    """One that has seen rounds of these seconds, and guesses accepted at these rates."""
    tuner = Autotuner(plans, predictor_of(predicted), use_clock=use_clock)
    for stage, num_guesses in 4 * [(stage, n) for stage in costs for n in (0, 4)]:
        tuner.note_round(stage, num_guesses, predictor_of(costs)(stage, num_guesses))
    for proposer, rate in rates.items():
        for _ in range(60):
            tuner.note_acceptance(proposer, 10, round(10 * rate))
    return tuner


@pytest.mark.parametrize("use_clock", [True, False])
@pytest.mark.parametrize(
    ("costs", "draft_rate", "retrieval_rate", "best"),
    [
        (COSTS, 0.5, 0.95, "triforce"),
        (COSTS, 0.9, 0.2, "naive"),
        (COSTS, 0.1, 0.9, "retrieval"),
        (COSTS, 0.0, 0.0, "autoregressive"),
        ({**COSTS, "draft": 0.1, "retrieval": 0.1}, 0.9, 0.9, "autoregressive"),
    ],
)
def test_the_best_plan_is_chosen(costs, draft_rate, retrieval_rate, best, use_clock):
    """Costs are measured ones where it may use the clock, else the predicted ones. Before the first
    step with the retrieval cache the target selects chunks in a step without it."""
    rates = {"draft": draft_rate, "retrieval": retrieval_rate}
    tuner = tuner_after(costs, rates, predicted=COSTS if use_clock else costs, use_clock=use_clock)
    first, plan = tuner.choose(), tuner.choose()
    assert first == (AR if bool(plan.gamma2) else plan)
    assert plan.method == best
    assert tuner.wants_retrieval == bool(plan.gamma2)
    assert tuner.plan == plan
    assert tuner.tokens_per_second(plan) == max(map(tuner.tokens_per_second, PLANS))


@pytest.mark.parametrize(("advantage", "changes"), [(0.5, False), (2.0, True)])
def test_the_current_plan_is_kept_against_a_small_advantage(advantage, changes):
    tuner = Autotuner([AR, NAIVE], predictor_of(COSTS), use_clock=False)
    speeds = {AR: 1.0, NAIVE: 1 + advantage * (HYSTERESIS - 1)}
    tuner.tokens_per_second = speeds.__getitem__
    assert tuner.choose() == (NAIVE if changes else AR)


@pytest.mark.parametrize("use_clock", [True, False])
def test_a_text_begins_without_guesses_until_the_target_was_timed(use_clock):
    """A target's first round says nothing: two steps are plain if times count; one more selects."""
    tuner = Autotuner(PLANS, predictor_of(COSTS), use_clock=use_clock)
    plain = 0
    while tuner.choose() == AR:
        plain += 1
        tuner.note_round("target", 0, COSTS["target"])
    assert plain == 2 * use_clock + 1


def test_a_stage_that_was_never_run_is_expected_to_be_as_far_off_as_the_target():
    """The machine is five times as slow as bytes suggest."""
    tuner = tuner_after({"target": 5 * COSTS["target"]}, {})
    fresh = Autotuner(PLANS, predictor_of(COSTS), use_clock=True)
    for plan in PLANS:
        assert 5 * tuner.tokens_per_second(plan) == pytest.approx(fresh.tokens_per_second(plan))


def test_a_tree_is_taken_only_while_its_nodes_cost_little():
    """A tree reads more tokens than a chain of its depth; else the two are alike."""
    chain, tree = StepPlan("naive", 2), StepPlan("naive", 2, 0, "8")
    for slope, best in ((0.0, tree), (0.5, AR)):
        predicted = predictor_of({"draft": 0.2, "target": 1.0}, slope)
        tuner = Autotuner([AR, tree, chain], predicted, use_clock=False)
        of_tree, of_chain = tuner.tokens_per_second(tree), tuner.tokens_per_second(chain)
        assert of_tree < of_chain if slope else of_tree == of_chain
        assert tuner.choose() == best


def test_a_prediction_is_expected_tokens_over_expected_seconds():
    """The last round of a retrieval level overshoots by half of what a round gives."""
    tuner = tuner_after({}, {}, [TRIFORCE], use_clock=False)
    draft, retrieval = (FIRST_RATES[stage] for stage in ("draft", "retrieval"))
    length = 2 + draft / 2  # 1 + draft tokens a round
    rounds, cost = length / (1 + draft), predictor_of(COSTS)
    seconds = rounds * (cost("draft", 0) + cost("retrieval", 1)) + cost("target", round(length))
    tokens = expected_tokens(retrieval, length)
    assert tuner.tokens_per_second(TRIFORCE) == pytest.approx(tokens / seconds)
    for rate, num in ((0.3, 2), (0.8, 5), (1.0, 3), (0.0, 4)):
        by_length = [rate**n * (1 - rate) * (n + 1) for n in range(num)]
        assert expected_tokens(rate, num) == pytest.approx(sum(by_length) + rate**num * (num + 1))


def test_a_measured_cost_moves_slowly_and_first_rounds_do_not_count():
    """First rounds may have compiled something; an outlier counts as twice what was known."""
    tuner = Autotuner([AR], predictor_of(COSTS), use_clock=True)
    tuner.choose()
    seconds = []
    for measured in (70.0, 0.1, 0.2, 90.0):
        tuner.note_round("target", 0, measured)
        seconds.append(1 / tuner.tokens_per_second(AR))
    assert seconds == pytest.approx([0.1, 0.1, 0.12, 0.12 + 0.2 * 0.12])


def slow_reader(rate, use_clock, *, draft=COSTS["draft"], slope=12 * SLOPE) -> Autotuner:
    """One that has seen no drafter read, and guesses accepted at this rate."""
    predicted = lambda stage, n: draft * (1 + slope * n) if stage == "draft" else COSTS[stage]  # noqa: E731
    tuner = Autotuner([AR, NAIVE], predicted, use_clock=use_clock)
    for _ in range(60):
        tuner.note_round("target", 0, COSTS["target"])
        tuner.note_acceptance("draft", 10, round(10 * rate))
    return tuner


@pytest.mark.parametrize("use_clock", [True, False])
def test_a_drafter_reads_its_window_only_if_the_rest_of_the_text_can_win_more(use_clock):
    """However long it was not used: a trial would cost 1.3 steps of the target. Of few tokens that
    it has missed it makes one near the end, too."""

    def first_trial(num_new, rate, tuner=None):
        tuner = tuner or slow_reader(rate, use_clock)
        for n in range(num_new):
            tuner.num_left = num_new - n
            if tuner.choose() == NAIVE:
                return n
        return None

    assert first_trial(3, 0.5) is None
    assert first_trial(6, 0.0) is None
    assert first_trial(1000, 0.5) == 0
    assert 0 < first_trial(3000, 0.0) < 3000
    tuner = slow_reader(0.5, use_clock)
    for plan, num_tested, rate in ((NAIVE, 10**6, 0.0), (AR, 10**9, 0.5)):
        assert tuner.choose() == plan
        tuner.note_acceptance("draft", num_tested, round(num_tested * rate))
    assert first_trial(16, 0.5, tuner) is not None
