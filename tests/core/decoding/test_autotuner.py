"""The autotuner finds the fastest plan, tries again what it misjudged, and wastes little on it."""

import functools
import itertools
import random
from typing import NamedTuple

import pytest

from minitri.core.decoding.autotuner import (
    FIRST_RATES,
    HYSTERESIS,
    RARITY,
    Autotuner,
    expected_tokens,
)
from minitri.core.settings import METHODS, SpeculationConfig, StepPlan

AR, NAIVE = StepPlan("autoregressive"), StepPlan("naive", 2)
TRIFORCE = StepPlan("triforce", 1, 2)
PLANS = SpeculationConfig().plans
COSTS = {"draft": 0.004, "retrieval": 0.030, "target": 0.100}
SLOPE = 0.04
"""What a guess more adds to a round."""


def cost_with_slope(costs, slope: float, stage: str, num_guesses: float) -> float:
    return costs[stage] * (1 + slope * num_guesses)


def prior_of(costs: dict[str, float]):
    return functools.partial(cost_with_slope, costs, SLOPE)


def tuner_after(costs, rates, plans=PLANS, *, prior=COSTS, use_clock=True) -> Autotuner:
    """One that has seen rounds of these seconds, and guesses accepted at these rates."""
    tuner = Autotuner(plans, prior_of(prior), use_clock=use_clock)
    for stage, num_guesses in 4 * [(stage, n) for stage in costs for n in (0, 4)]:
        tuner.note_round(stage, num_guesses, prior_of(costs)(stage, num_guesses))
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
    """From measured costs where it may use the clock, else from the prior ones."""
    rates = {"draft": draft_rate, "retrieval": retrieval_rate}
    tuner = tuner_after(costs, rates, prior=COSTS if use_clock else costs, use_clock=use_clock)
    plan = tuner.choose()
    assert plan.method == best
    assert tuner.plan == plan
    assert tuner.tokens_per_second(plan) == max(map(tuner.tokens_per_second, PLANS))


@pytest.mark.parametrize(("advantage", "changes"), [(0.5, False), (2.0, True)])
def test_the_current_plan_is_kept_against_a_small_advantage(advantage, changes):
    tuner = Autotuner([AR, NAIVE], prior_of(COSTS), use_clock=False)
    speeds = {AR: 1.0, NAIVE: 1 + advantage * (HYSTERESIS - 1)}
    tuner.tokens_per_second = speeds.__getitem__
    assert tuner.choose() == (NAIVE if changes else AR)


@pytest.mark.parametrize("use_clock", [True, False])
def test_a_text_begins_without_guesses_until_the_target_was_timed(use_clock):
    """Where times count: its first round says nothing, so in two steps."""
    tuner = Autotuner(PLANS, prior_of(COSTS), use_clock=use_clock)
    plain = 0
    while tuner.choose() == AR:
        plain += 1
        tuner.note_round("target", 0, COSTS["target"])
    assert plain == 2 * use_clock


def test_a_stage_that_was_never_run_is_expected_to_be_as_far_off_as_the_target():
    """On a machine five times as slow as bytes suggest."""
    tuner = tuner_after({"target": 5 * COSTS["target"]}, {})
    fresh = Autotuner(PLANS, prior_of(COSTS), use_clock=True)
    for plan in PLANS:
        assert 5 * tuner.tokens_per_second(plan) == pytest.approx(fresh.tokens_per_second(plan))


def test_a_lookup_that_should_cost_nothing_costs_what_was_measured():
    """N-grams read no weights, so their prior is 0."""
    tuner = Autotuner(PLANS, prior_of({**COSTS, "draft": 0.0}), use_clock=True)
    free = tuner.tokens_per_second(NAIVE)
    for _ in range(2):
        tuner.note_round("draft", 0, 0.004)
        tuner.note_round("target", 2, prior_of(COSTS)("target", 2))
    paid = Autotuner(PLANS, prior_of(COSTS), use_clock=True).tokens_per_second(NAIVE)
    assert tuner.tokens_per_second(NAIVE) == pytest.approx(paid)
    assert paid < 0.95 * free


def test_a_tree_is_taken_only_while_its_nodes_cost_little():
    """It reads more tokens, here and there, than a chain of its depth; else they are alike."""
    chain, tree = StepPlan("naive", 2), StepPlan("naive", 2, 0, "8")
    for slope, best in ((0.0, tree), (0.5, AR)):
        costs = {"draft": 0.2, "target": 1.0}
        prior = functools.partial(cost_with_slope, costs, slope)
        tuner = Autotuner([AR, tree, chain], prior, use_clock=False)
        of_tree, of_chain = tuner.tokens_per_second(tree), tuner.tokens_per_second(chain)
        assert of_tree < of_chain if slope else of_tree == of_chain
        assert tuner.choose() == best


def test_a_prediction_is_expected_tokens_over_expected_seconds():
    """Of a retrieval level whose last round overshoots by half of what a round gives."""
    tuner = tuner_after({}, {}, [TRIFORCE], use_clock=False)
    draft, retrieval = (FIRST_RATES[stage] for stage in ("draft", "retrieval"))
    length = 2 + draft / 2  # 1 + draft tokens a round
    rounds, cost = length / (1 + draft), prior_of(COSTS)
    seconds = rounds * (cost("draft", 0) + cost("retrieval", 1)) + cost("target", length)
    tokens = expected_tokens(retrieval, length)
    assert tuner.tokens_per_second(TRIFORCE) == pytest.approx(tokens / seconds)
    for rate, num in ((0.3, 2), (0.8, 5), (1.0, 3), (0.0, 4)):
        by_length = [rate**n * (1 - rate) * (n + 1) for n in range(num)]
        assert expected_tokens(rate, num) == pytest.approx(sum(by_length) + rate**num * (num + 1))


class Machine(NamedTuple):
    """Milliseconds of rounds; the drafter's and the retrieval level's acceptance rates."""

    name: str
    ms: tuple[float, float, float]
    rates: tuple[float, float]

    @property
    def costs(self) -> dict[str, float]:
        return dict(zip(COSTS, self.ms, strict=True))


MACHINES = [
    Machine("a small model on a CPU after 8,000 tokens", (3.7, 40, 62), (0.51, 0.93)),
    Machine("on another CPU", (4.5, 33, 56), (0.52, 0.96)),
    Machine("32,000 tokens", (4, 44, 115), (0.50, 0.80)),
    Machine("n-grams that find nothing", (0.1, 30, 62), (0.05, 0.93)),
    Machine("nothing is faster", (4.7, 35, 40), (0.05, 0.6)),
    Machine("a large model on a GPU", (1.5, 9, 33), (0.47, 0.92)),
    Machine("KV in host memory", (1.5, 9, 2500), (0.47, 0.92)),
]


@functools.cache
def wander(seed: str, memory: float, sigma: float) -> list[float]:
    """A random walk that is pulled back to 0."""
    generator = random.Random(seed)
    noise = (generator.gauss(0, sigma) for _ in range(2000))
    return list(itertools.accumulate(noise, lambda x, step: memory * x + step, initial=0.0))


class Simulation:
    """Decoding with noisy times that drift, and acceptance rates that wander, in the same way for
    all methods of a seed. The prior costs of one stage may be wrong by a factor."""

    def __init__(self, machine: Machine, method: str, seed: int, drift: float, wrong) -> None:
        self.random = random.Random(seed)
        self.machine = machine
        self.cost = prior_of(machine.costs)
        prior = {**machine.costs, wrong[0]: machine.costs[wrong[0]] * wrong[1]}
        self.tuner = Autotuner(SpeculationConfig(method).plans, prior_of(prior), use_clock=True)
        self.known: set[str] = set()
        self.ms = 0.0
        self.num_tokens = 0
        self.slowness = wander(f"slowness {seed}", 0.98, drift)
        self.luck = wander(f"luck {seed}", 0.97, 0.03)

    def run_round(self, stage: str, num_guesses: int, proposer: str | None = None) -> int:
        """Its new tokens: the accepted guesses and one of its own."""
        slowness = self.slowness[int(2 * self.ms / self.machine.ms[2])]
        ms = self.cost(stage, num_guesses) * self.random.lognormvariate(slowness, 0.12)
        ms *= 1 if stage in self.known else 2
        self.known.add(stage)
        self.ms += ms
        self.tuner.note_round(stage, num_guesses, ms)
        rate = self.machine.rates[proposer != "draft"]
        rate += self.luck[self.num_tokens // 2] * (1 - rate)
        rejected = (i for i in range(num_guesses) if self.random.random() >= rate)
        num_accepted = next(rejected, num_guesses)
        if proposer is not None:
            num_tested = min(num_accepted + 1, num_guesses)
            self.tuner.note_acceptance(proposer, num_tested, num_accepted)
        return num_accepted + 1

    def step(self) -> None:
        had_drafter = self.tuner.plan.uses_drafter
        plan = self.tuner.choose()
        if plan.uses_drafter and not had_drafter:
            self.ms += 3 * self.machine.costs["draft"]
        proposer = "draft" if plan.uses_drafter else None
        if not plan.uses_retrieval:
            self._draft(plan.gamma1)
            self.num_tokens += self.run_round("target", plan.gamma1, proposer)
            return
        length = 0
        while length < plan.gamma2:
            self._draft(plan.gamma1)
            length += self.run_round("retrieval", plan.gamma1, proposer)
        self.num_tokens += self.run_round("target", length, "retrieval")

    def _draft(self, gamma1: int) -> None:
        for _ in range(gamma1):
            self.run_round("draft", 0)


@functools.cache
def simulated_ms(
    machine: Machine, method: str, num_seeds: int, num_tokens: int, drift=0.0, wrong=("draft", 1.0)
) -> float:
    """Milliseconds per token, mean over seeds."""
    total = 0.0
    for seed in range(num_seeds):
        simulation = Simulation(machine, method, seed, drift, wrong)
        while simulation.num_tokens < num_tokens:
            simulation.step()
        total += simulation.ms / simulation.num_tokens / num_seeds
    return total


@pytest.mark.parametrize(
    ("num_tokens", "drift", "wrong", "most"),
    [(128, drift, ("draft", 1.0), 0.1) for drift in (0.0, 0.04)]
    + [(256, 0.0, (stage, by), 0.15) for stage in ("draft", "retrieval") for by in (0.5, 2.0)],
)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_auto_is_nearly_as_fast_as_the_best_method(machine, num_tokens, drift, wrong, most):
    """What it tries on the way included; also where bytes say half or twice what a stage takes."""
    num_seeds = 2048 // num_tokens
    fixed = [simulated_ms(machine, name, num_seeds, num_tokens, drift) for name in METHODS[1:]]
    loss = simulated_ms(machine, "auto", num_seeds, num_tokens, drift, wrong) / min(fixed) - 1
    assert loss < most


def test_what_must_catch_up_for_long_is_tried_rarely():
    """A drafter that reads its window again for every row of a batch, at 50 times the gain."""

    def steps_between_trials(catching_up):
        tuner = tuner_after({**COSTS, "draft": 0.2}, {"draft": 0.1}, [AR, NAIVE])
        tuner.note_catching_up("draft", catching_up)
        return next(n for n in itertools.count() if tuner.choose() == NAIVE)

    soon = steps_between_trials(0.0)
    assert 50 < soon < 500  # where nothing is faster than the model alone, by far
    assert steps_between_trials(3.0) == pytest.approx(soon + RARITY * 3.0 / COSTS["target"], abs=2)
