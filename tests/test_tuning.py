"""Method auto: the choice between plans pays, keeps the law, and leaves every cache in order."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from minitri import End, GenerationConfig, SamplingParams, SpeculationConfig, assembly
from minitri.settings import Plan
from minitri.decoding.stats import LevelStats
from minitri.decoding.autotuner import (
    BUDGET_POWER,
    CPU_COSTS,
    NUM_WARM_UP,
    OPTIMISM,
    Tuner,
    expected_tokens,
    nominal_costs,
)
from tests.cascades import Rig, near_copy, plain_tokens, random_prompt, tiny_engine
from tests.conftest import tiny_config, tiny_model
from tests.exactness import Laws, law_of_steps, target_law, toy_cascade

AR, NAIVE = Plan("autoregressive"), Plan("naive", 2)
RETRIEVAL, TRIFORCE = Plan("retrieval", 0, 2), Plan("triforce", 1, 2)
ALL = [AR, NAIVE, RETRIEVAL, TRIFORCE]


def stack(top, middle, drafter, plan: Plan) -> None:
    """What `assembly.Stages` does, for the toy cascade."""
    below = drafter if plan.gamma1 else None
    if below is not None:
        below.block = plan.gamma1
    if plan.gamma2:
        middle.below, middle.block = below, plan.gamma2
        below = middle
    top.below = below


@pytest.mark.parametrize("order", list(itertools.permutations([AR, Plan("naive", 1), Plan("triforce", 1, 1)])))
def test_a_schedule_of_switches_gives_the_target_law(order):
    """Summed over all coins of two steps, with the stages stacked anew before each."""
    target = Laws(3, 0)
    middle, draft = Laws(3, 1, near=target), Laws(3, 2, near=target)

    def build(coins, batch_size):
        cascade = toy_cascade(coins, batch_size, target, middle, draft, 1, 1)
        top = cascade._top
        levels = (top, top.below, top.below.below)
        plans = iter(order)
        cascade._steer = lambda active: stack(*levels, next(plans))
        return cascade

    law = law_of_steps(build, 3, target, num_steps=2)
    assert (law - target_law(target, 3)).abs().max() < 1e-12


def measured(seconds: dict[str, float], rates: dict[tuple[str, str], float]) -> list[LevelStats]:
    """Stages that have run for a while, at these costs per round and with these acceptance rates."""
    stages = {name: LevelStats(name) for name in seconds}
    for name, cost in seconds.items():
        for guesses in (0, 0, 4, 4):
            stages[name].recent.note_time(guesses, cost)
    for (verifier, proposer), rate in rates.items():
        for _ in range(40):
            stages[verifier].recent.note(proposer, num_tested=10, num_accepted=round(10 * rate))
    return list(stages.values())


COSTS = {"draft": 0.004, "retrieval": 0.030, "target": 0.100}


def NOMINAL(stage: str, num_guesses: float, budget: int = 0) -> float:
    """Bytes suggest the same."""
    return COSTS[stage] * (1 + 0.04 * num_guesses)


@pytest.mark.parametrize(
    ("costs", "rates", "best"),
    [
        (COSTS, (0.9, 0.9, 0.1), "triforce"),
        (COSTS, (0.9, 0.2, 0.9), "naive"),
        (COSTS, (0.1, 0.95, 0.1), "retrieval"),
        (COSTS, (0.05, 0.05, 0.05), "autoregressive"),
        ({**COSTS, "draft": 0.1, "retrieval": 0.1}, (0.9, 0.9, 0.6), "autoregressive"),
    ],
)
def test_what_pays_is_chosen(costs, rates, best):
    pairs = (("retrieval", "draft"), ("target", "retrieval"), ("target", "draft"))
    stages = measured(costs, dict(zip(pairs, rates, strict=True)))
    tuner = Tuner(stages, SpeculationConfig().plans, NOMINAL, timed=True)
    for _ in range(3):
        plan = tuner.choose()
    assert plan.method == best
    assert tuner.tokens_per_second(plan) == max(map(tuner.tokens_per_second, SpeculationConfig().plans))


@pytest.mark.parametrize(("advantage", "changes"), [(1.01, False), (1.2, True)])
def test_the_current_plan_is_kept_against_a_small_advantage(advantage, changes):
    stages = measured(COSTS, {("target", "draft"): 0.5, ("target", "retrieval"): 0.5})
    naive, retrieval = Plan("naive", 1), Plan("retrieval", 0, 1)
    tuner = Tuner(stages, [naive, retrieval], NOMINAL, timed=False)
    tuner.tokens_per_second = lambda plan, rate=None, budget=None: 1.0
    assert [tuner.choose() for _ in range(NUM_WARM_UP)] == [naive] * NUM_WARM_UP
    tuner.tokens_per_second = lambda plan, rate=None, budget=None: advantage if plan == retrieval else 1.0
    assert (tuner.choose() == retrieval) == changes


def test_the_first_choices_are_free():
    """No plan is current by merit yet: not the first of the list, and not one about whose cost nothing is known."""
    plans = [Plan("autoregressive"), Plan("naive", 1), Plan("retrieval", 0, 1)]
    stages = measured(COSTS, {("target", "draft"): 0.5, ("target", "retrieval"): 0.5})
    tuner = Tuner(stages, plans, NOMINAL, timed=True)
    for better in ("naive", "retrieval"):
        tuner.tokens_per_second = lambda plan, rate=None, better=better: 1.01 if plan.method == better else 1.0
        assert tuner.choose().method == better


def test_what_was_not_measured_costs_what_bytes_suggest_beside_what_was():
    """On a machine five times as slow as the nominal one; a first round that is slow for reasons of its own counts no
    more than that, and later ones are believed."""
    stages = {name: LevelStats(name) for name in COSTS}
    tuner = Tuner(list(stages.values()), ALL, NOMINAL, timed=True)
    assert tuner._cost("draft", 0) == COSTS["draft"]
    stages["target"].recent.note_time(0, 5 * COSTS["target"])
    stages["target"].recent.note_time(0, 5 * COSTS["target"])
    assert tuner._cost("draft", 0) == pytest.approx(5 * COSTS["draft"])
    stages["draft"].recent.note_time(0, 80 * COSTS["draft"])
    assert tuner._cost("draft", 0) == pytest.approx(5 * COSTS["draft"])
    stages["draft"].recent.note_time(0, 2 * COSTS["draft"])
    assert tuner._cost("draft", 0) == pytest.approx(2 * COSTS["draft"])


def test_a_stage_whose_first_round_was_slow_gets_another_chance():
    stages = measured(COSTS, {("target", "draft"): 0.5})
    slow = LevelStats("retrieval")
    tuner = Tuner([stage for stage in stages if stage.name != "retrieval"] + [slow], ALL, NOMINAL, timed=True)
    slow.recent.note_time(0, 9.0)
    before = tuner._cost("retrieval", 0)
    for _ in range(100):
        tuner.choose()
    assert tuner._cost("retrieval", 0) < 0.5 * before
    slow.recent.note_time(0, 9.0)
    assert tuner._cost("retrieval", 0) == 9.0


def test_a_stage_that_was_tried_in_a_slow_moment_gets_another_chance():
    """On a machine on which triforce is best, but whose first two rounds of the retrieval level took twice as long."""
    costs, rates = {"draft": 0.0045, "retrieval": 0.033, "target": 0.056}, {"draft": 0.52, "retrieval": 0.96}
    stages = {name: LevelStats(name) for name in costs}
    tuner = Tuner(
        list(stages.values()), SpeculationConfig().plans, lambda name, n, _: costs[name] * (1 + 0.04 * n), timed=True
    )

    def run_round(name: str, num_guesses: int, proposer: str | None = None) -> None:
        slowness = 2 if name == "retrieval" and stages[name].recent.num_rounds < 2 else 1
        stages[name].recent.note_time(num_guesses, slowness * costs[name] * (1 + 0.04 * num_guesses))
        rate = rates.get(proposer, 0)
        if proposer:
            accepted = expected_tokens(rate, num_guesses) - 1
            stages[name].recent.note(proposer, num_tested=accepted / rate, num_accepted=accepted)

    used = []
    for _ in range(1000):
        plan = tuner.choose()
        used.append(plan.method)
        for _ in range(plan.gamma1):
            run_round("draft", 0)
        if plan.gamma2:
            run_round("retrieval", plan.gamma1, "draft" if plan.gamma1 else None)
        proposer = {"naive": "draft", "autoregressive": None}.get(plan.method, "retrieval")
        run_round("target", plan.gamma2 or plan.gamma1, proposer)
    assert used[-50:] == ["triforce"] * 50


def test_nominal_costs_count_the_cache_of_every_row():
    target = tiny_model(tiny_config())
    one, two = (nominal_costs(target, None, tokens)("target", 0, 0) for tokens in (10**6, 2 * 10**6))
    kv_bytes = target.config.kv_values_per_token * 4 * 10**6
    assert two - one == pytest.approx(kv_bytes / CPU_COSTS[2])
    seen = []
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(assembly, "nominal_costs", lambda target, draft, tokens, *rest: seen.append(tokens) or NOMINAL)
        Rig(target, [random_prompt(target.config, n) for n in (30, 45)], method="autoregressive")
    assert seen == [75]


def test_a_drafter_is_expected_to_be_as_good_for_one_verifier_as_for_the_other():
    stages = measured(COSTS, {("retrieval", "draft"): 0.2})
    tuner = Tuner(stages, ALL, NOMINAL, timed=True)
    assert tuner.rate("target", "draft") == pytest.approx(0.2, abs=0.03)
    assert tuner.rate("target", "retrieval") == OPTIMISM["retrieval"]


def simulated_ms_per_token(
    method: str,
    costs,
    rates,
    seed: int,
    *,
    num_tokens=128,
    wrong=("", 1.0),
    budgets=(1024,),
    budget=1024,
    slot=0.0,
    power=BUDGET_POWER,
    drift=0.0,
) -> float:
    """Decoding on a machine whose rounds have these seconds and some noise, twice as long for the first of a stage, and
    whose speed drifts, with guesses accepted at these rates, which wander. A drafter that takes part again has to read
    what it missed. The bytes of one stage may suggest something wrong. Costs and rates are those of a budget of 1024; a
    slot more costs a round of the retrieval level so many seconds, and rejections fall as the budget to this power."""
    generator = random.Random(seed)
    stages = {name: LevelStats(name) for name in costs}

    def nominal(stage: str, num_guesses: float, budget: int) -> float:
        return (costs[stage] + (slot * (budget - 1024) if stage == "retrieval" else 0)) * (1 + 0.04 * num_guesses)

    def suggested(stage: str, num_guesses: float, budget: int) -> float:
        return nominal(stage, num_guesses, budget) * (wrong[1] if stage == wrong[0] else 1)

    tuner = Tuner(
        list(stages.values()), SpeculationConfig(method).plans, suggested, timed=True, budgets=budgets,
        budget=budget,
    )  # fmt: skip
    tokens, seconds, luck, slowness = 0, 0.0, 0.0, 0.0

    def run_round(name: str, num_guesses: int, proposer: str | None = None) -> int:
        nonlocal seconds, slowness
        slowness = 0.98 * slowness + generator.gauss(0, drift)
        first = 1 if stages[name].recent.num_rounds else 2
        cost = nominal(name, num_guesses, tuner.budget) * generator.lognormvariate(slowness, 0.12) * first
        seconds += cost
        stages[name].recent.note_time(num_guesses, cost)
        rate = rates.get((name, proposer), 0)
        if proposer == "retrieval":
            rate = 1 - (1 - rate) * (tuner.budget / 1024) ** power
        accepted = next((i for i in range(num_guesses) if generator.random() >= rate + luck * (1 - rate)), num_guesses)
        stages[name].record(num_draft=num_guesses, num_accepted=accepted, proposer=proposer)
        return accepted + 1

    while tokens < num_tokens:
        luck = 0.97 * luck + generator.gauss(0, 0.03)
        had_drafter = tuner.plan.gamma1 > 0
        plan, length, proposer = tuner.choose(), 0, None
        seconds += 3 * costs["draft"] if plan.gamma1 and not had_drafter else 0
        while plan.gamma2 and length < plan.gamma2:
            proposer = "retrieval"
            for _ in range(plan.gamma1):
                run_round("draft", 0)
            length += run_round("retrieval", plan.gamma1, "draft" if plan.gamma1 else None)
        if plan.method == "naive":
            proposer, length = "draft", plan.gamma1
            for _ in range(plan.gamma1):
                run_round("draft", 0)
        tokens += run_round("target", length, proposer)
    return 1e3 * seconds / tokens


MACHINES = pytest.mark.parametrize(
    ("costs", "rates", "best"),
    [  # milliseconds; the drafter for either level, the retrieval level for the target
        ((3.7, 40, 62), (0.51, 0.93), "naive"),  # a small model on a CPU behind 8,000 tokens
        ((4.5, 33, 56), (0.52, 0.96), "triforce"),  # on another CPU
        ((4, 44, 115), (0.50, 0.80), "naive"),  # 32,000
        ((0.1, 30, 62), (0.05, 0.93), "retrieval"),  # n-grams that find nothing
        ((4.7, 35, 40), (0.05, 0.6), "autoregressive"),  # nothing pays
        ((1.5, 9, 33), (0.47, 0.92), "triforce"),  # a large model on a GPU
        ((1.5, 9, 2500), (0.47, 0.92), "triforce"),  # with its KV cache in host memory
    ],
)


@MACHINES
@pytest.mark.parametrize("drift", [0.0, 0.04])
def test_auto_is_nearly_as_fast_as_the_best_method_of_which_nobody_told_it(costs, rates, best, drift):
    """Within 10 % over 128 tokens, what it tries on the way included, on a machine that is shared with others, too."""
    mean = simulated_means(costs, rates, ("auto", "autoregressive", "naive", "retrieval", "triforce"), drift=drift)
    auto = mean.pop("auto")
    print(f"{best}, drift {drift}: {auto / min(mean.values()):.3f}")
    assert drift or mean[best] < 1.03 * min(mean.values())
    assert auto < 1.1 * min(mean.values())


@MACHINES
@pytest.mark.parametrize("stage", ["draft", "retrieval"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_bytes_that_suggest_wrong_costs_do_not_lead_astray_for_long(costs, rates, best, stage, factor):
    mean = simulated_means(costs, rates, ("auto", best), num_seeds=8, num_tokens=256, wrong=(stage, factor))
    print(f"{best}, {stage} {factor}: {mean['auto'] / mean[best]:.3f}")
    assert mean["auto"] < 1.15 * mean[best]


def simulated_means(costs, rates, methods, num_seeds=16, **settings) -> dict[str, float]:
    """Milliseconds per token of several methods, means over seeds."""
    seconds = dict(zip(("draft", "retrieval", "target"), costs, strict=True))
    by = {("retrieval", "draft"): rates[0], ("target", "draft"): rates[0], ("target", "retrieval"): rates[1]}
    return {
        method: sum(simulated_ms_per_token(method, seconds, by, seed, **settings) for seed in range(num_seeds))
        / num_seeds
        for method in methods
    }


def test_break_even_is_where_speculation_is_as_fast_as_the_model_alone():
    stages = measured(COSTS, {("target", "draft"): 0.7})
    tuner = Tuner(stages, [AR, NAIVE], NOMINAL, timed=True)
    tuner.plan = NAIVE
    rate = tuner.break_even()
    assert tuner.tokens_per_second(NAIVE, rate) == pytest.approx(tuner.tokens_per_second(AR), rel=0.01)
    tuner.plan = AR
    assert tuner.break_even() is None


def test_expected_tokens_are_those_of_independent_guesses():
    generator = random.Random(0)
    for rate, num in ((0.3, 2), (0.8, 5), (1.0, 3), (0.0, 4)):
        total = 0
        for _ in range(20_000):
            total += 1 + next((i for i in range(num) if generator.random() >= rate), num)
        assert expected_tokens(rate, num) == pytest.approx(total / 20_000, abs=0.05)  # about 5 standard errors


def forced(monkeypatch, plans) -> None:
    schedule = itertools.cycle(plans)

    def choose(tuner):
        tuner.plan = next(schedule)
        return tuner.plan

    monkeypatch.setattr(Tuner, "choose", choose)


SCHEDULES = [ALL, [AR] * 7 + [NAIVE] * 2, [TRIFORCE, AR, AR, AR, AR, RETRIEVAL], [Plan("triforce", 4, 8), AR]]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("coupled", [False, True])
def test_any_schedule_gives_the_text_of_the_model_alone(schedule, with_model, coupled, monkeypatch):
    """Ragged rows, retrieval caches that are eaten up, a drafter's window that slides."""
    target = tiny_model(tiny_config())
    draft = near_copy(target, 0.05) if with_model else None
    prompts = [random_prompt(target.config, n, seed=n) for n in (3, 40, 90)]
    settings = {"num_new": 70, "seed": 5, "coupled": coupled}
    settings["sampling"] = SamplingParams(0.9, top_p=0.95) if coupled else SamplingParams()
    expected = plain_tokens(target, prompts, **settings)
    forced(monkeypatch, schedule)
    rig = Rig(target, prompts, draft=draft, budget=32, num_recent_tokens=20, num_sink_tokens=2, **settings)
    assert rig.run() == expected


def test_a_drafter_that_was_left_out_for_long_knows_the_text_again(monkeypatch):
    """A drafter that is the target, with a window that holds everything, is always right."""
    target = tiny_model(tiny_config())
    forced(monkeypatch, [AR] * 30 + [NAIVE] * 10)
    rig = Rig(target, [random_prompt(target.config, 20)], draft=near_copy(target, 0.0), num_new=55,
              num_recent_tokens=120)  # fmt: skip
    rig.run()
    level = rig.stats.stages[-1]
    assert level.num_tested_tokens >= 15
    assert level.acceptance_rate == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("noise", [0.02, None])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, top_p=0.9)])
def test_auto_is_the_default_and_repeats_itself_whatever_the_clock_says(noise, sampling, dtype, monkeypatch):
    engine, generation = tiny_engine(noise=noise), GenerationConfig(90, ignore_eos=True)
    for model in (engine.model, engine.draft):
        if model is not None:
            model.to(dtype)
    prompt = random_prompt(engine.config, 150)

    def text(**settings) -> tuple[int, ...]:
        *_, end = engine.generate(prompt, sampling=sampling, generation=generation, seed=4, **settings)
        assert isinstance(end, End)
        assert sum(end.stats.steps_per_plan.values()) > 0
        return end.token_ids

    first = text()
    clock, now = random.Random(3), [0.0]

    def erratic() -> float:
        now[0] += clock.random()
        return now[0]

    monkeypatch.setattr(time, "perf_counter", erratic)
    assert text() == first
    if sampling.temperature == 0 and dtype == torch.float32:
        assert text(speculation=SpeculationConfig("autoregressive")) == first


def test_a_row_that_ended_costs_nothing_in_a_stage_that_was_left_out(monkeypatch):
    target = tiny_model(tiny_config())
    forced(monkeypatch, [TRIFORCE, AR, AR, TRIFORCE])
    prompts = [random_prompt(target.config, n, seed=n) for n in (30, 40)]
    rig = Rig(target, prompts, draft=near_copy(target, 0.1), budget=32, num_recent_tokens=20, num_new=40)
    with torch.inference_mode():
        rig.start()
        rig.step(), rig.step()  # the second alone
        rig.cascade.retire(1)
        rig.step(), rig.step()
    for reader in rig.readers.values():
        assert reader.cache.lengths[1] == 0
        assert reader.cache.lengths[0] > 0


def test_coupled_auto_gives_the_text_of_the_model_alone():
    engine, generation = tiny_engine(), GenerationConfig(60, ignore_eos=True)
    texts = []
    for method in ("auto", "autoregressive"):
        speculation = SpeculationConfig(method, coupled=True)
        *_, end = engine.generate(
            random_prompt(engine.config, 100), sampling=SamplingParams(1.0), generation=generation,
            speculation=speculation, seed=9,
        )  # fmt: skip
        texts.append(end.token_ids)
    assert texts[0] == texts[1]


def test_a_gamma_that_was_given_is_kept():
    plans = SpeculationConfig(gamma1=3, gamma2=5).plans
    assert {plan.gamma1 for plan in plans} == {0, 3}
    assert {plan.gamma2 for plan in plans} == {0, 5}
    assert SpeculationConfig("naive", gamma1=3).plans == [Plan("naive", 3)]
    assert len(SpeculationConfig("naive").plans) > 1


def test_costs_between_and_beyond_what_was_measured_lie_on_a_line():
    recent = LevelStats("target").recent
    assert recent.seconds_of_round(3) is None
    recent.note_time(0, 1.0)
    recent.note_time(0, 1.0)
    assert 1.0 < recent.seconds_of_round(4) < 1.5
    recent.note_time(4, 9.0)
    assert recent.seconds_of_round(4) < 1.5  # a length's first round may be slow for reasons of its own
    recent.note_time(4, 2.0)
    assert recent.seconds_of_round(2) == pytest.approx(1.5)
    assert recent.seconds_of_round(8) == pytest.approx(3.0)
    for _ in range(20):
        recent.note_time(4, 3.0)
    assert recent.seconds_of_round(4) == pytest.approx(3.0, abs=0.1)
    assert torch.isfinite(torch.tensor(recent.seconds_of_round(100)))


def test_fewer_guesses_are_never_expected_to_cost_more():
    """A machine that was slow when one guess was verified, and is not while three are."""
    recent = LevelStats("target").recent
    for guesses, seconds in ((1, 1.6), (3, 1.3), (5, 1.4)):
        recent.note_time(guesses, seconds)
        recent.note_time(guesses, seconds)
    assert [recent.seconds_of_round(n) for n in (1, 2, 3)] == [1.3] * 3
    assert recent.seconds_of_round(0) == pytest.approx(1.3 * 0.96)
    assert recent.seconds_of_round(7) == pytest.approx(1.5)
    for _ in range(20):
        recent.note_time(1, 2.0)  # now it is slow again
    assert [round(recent.seconds_of_round(n), 1) for n in (1, 3, 5, 7)] == [2.0] * 4
