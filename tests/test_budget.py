"""The budget of the retrieval cache may change while a text is written: the cache follows, and the tuner knows when."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from minitri import SpeculationConfig
from minitri.caches.full import FullCache
from minitri.settings import POLICIES
from minitri.decoding.autotuner import BUDGET_EVIDENCE, BUDGET_PERIOD, BUDGET_POWER, Tuner
from tests.cascades import GREEDY, WARM, Rig, near_copy, plain_tokens, random_prompt
from tests.conftest import CPU, tiny_config, tiny_model
from tests.test_offloaded_cache import offloaded
from tests.test_retrieval_cache import Bench, check_build
from tests.test_tuning import measured, simulated_means

PROMPT_LENGTHS = (3, 1100, 2100)  # budgets from 256 to 256, 552 and 1056
CONFIG = tiny_config(num_layers=5, context_length=4096)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sizes", [(64, 32), (64, 128, 64), (64, 24, 128, 32)])
def test_another_budget_holds_from_the_next_choice_on(policy, sizes):
    """Of one row; the one beside it keeps its own."""
    bench = Bench(policy, budget=sizes[0], most=max(sizes), batch_size=2, num_sink_tokens=8)
    for b in range(2):
        bench.read(200, b)
        assert bench.commit(b=b) == 1
    for budget in sizes[1:]:
        assert bench.commit(3) == 0
        bench.cache.resize([budget, sizes[0]])
        assert bench.cache.lengths == bench.cache.budgets != [budget, sizes[0]]
        assert bench.commit(2) == 1
        assert bench.cache.lengths == bench.cache.budgets == [budget, sizes[0]]
        M = bench.policy.unit
        sinks, recent = 8 // M, min(8 // M, max(1, budget // M // 4))
        check_build(bench, policy, budget=budget, M=M, sinks=sinks, recent=recent, count=2)
        assert [bench.commit(4, b) for b in range(2)] == [0, 0]
        bench.held(0), bench.held(1)  # every slot has K and V of a token


def test_a_budget_beyond_the_text_waits_for_it_and_keeps_nothing_from_being_chosen():
    bench = Bench(budget=32, most=128, rebuild_stride=20)
    bench.read(60)
    bench.commit()
    bench.cache.resize([128])
    rebuilds, sizes = [], []
    while bench.full.lengths[0] < 150:
        rebuilds.append(bench.commit())
        sizes.append(bench.cache.lengths[0])
        bench.held()
    assert set(sizes) == {32, 128}
    assert sizes.index(128) == 129 - 61  # the pass that begins behind token 129 is the first to have more than it
    assert sum(rebuilds[:60]) >= 2


def test_a_text_that_the_cache_holds_is_not_chosen_from():
    bench = Bench(budget=64, most=64)
    bench.read(40)
    bench.commit()
    bench.cache.resize([32])
    assert [bench.commit() for _ in range(5)] == [0] * 5
    assert bench.held()[0][0] == list(range(46))
    while bench.full.lengths[0] <= 64:
        assert bench.commit() == 0
    assert bench.commit() == 1
    assert bench.cache.lengths == [32]


def resize_now_and_then(monkeypatch, order) -> list[int]:
    """Has the tuner want another budget before every third step, whatever it thinks of it."""
    wanted, steps, seen = itertools.cycle(order), itertools.count(), []
    choose = Tuner.choose

    def forced(tuner):
        if next(steps) % 3 == 2:
            tuner.budget = tuner._budgets[next(wanted) % len(tuner._budgets)]
            seen.append(tuner.budget)
        return choose(tuner)

    monkeypatch.setattr(Tuner, "choose", forced)
    return seen


@pytest.mark.parametrize("method", ["retrieval", "triforce", "auto"])
@pytest.mark.parametrize(("sampling", "coupled"), [(GREEDY, False), (WARM, True)])
def test_changing_budgets_change_no_token_and_leave_exact_kv(method, sampling, coupled, monkeypatch):
    """After every step each slot of the small cache holds K and V of a token of the text."""
    target = tiny_model(CONFIG)
    prompts = [random_prompt(CONFIG, n, seed=n) for n in PROMPT_LENGTHS]
    settings = {"num_new": 24, "sampling": sampling, "coupled": coupled, "seed": 3, "prefill_chunk": 512}
    expected = plain_tokens(target, prompts, **settings)
    seen = resize_now_and_then(monkeypatch, (0, 2, 1))
    rig = Rig(target, prompts, draft=near_copy(target, 0.02), method=method, **settings)
    sizes = set()

    def check(rig) -> None:
        sizes.add(tuple(rig.small.budgets))
        for b, length in enumerate(rig.small.lengths):
            if not rig.cascade.active[b]:
                continue
            end = rig.full.lengths[b]
            for small, exact in ((rig.small.keys, rig.full.keys), (rig.small.values, rig.full.values)):
                held = {tuple(slot) for slot in small[1, b, 0, :length].tolist()}
                assert held <= {tuple(slot) for slot in exact[1, b, 0, :end].tolist()}

    assert rig.run(check) == expected
    assert len(set(seen)) == 3
    assert len(sizes) >= 3
    assert rig.stats.num_rebuilds > 4
    assert rig.stats.budgets


def test_changing_budgets_over_hosted_kv_leave_the_same_cache(monkeypatch):
    """Chosen anew while each layer is staged, or afterwards: to the bit."""
    target, prompts = tiny_model(CONFIG), [random_prompt(CONFIG, n, seed=n) for n in PROMPT_LENGTHS]
    settings = {"method": "retrieval", "num_new": 24, "sampling": WARM, "prefill_chunk": 512}

    def caches_after_steps(full) -> tuple[list, set]:
        resize_now_and_then(monkeypatch, (0, 2, 1))
        rig = Rig(target, prompts, full=full, **settings)
        seen, sizes = [], set()

        def note(rig) -> None:
            sizes.add(tuple(rig.small.budgets))
            seen.append([slots[:, b, :, :length].clone() for b, length in enumerate(rig.small.lengths)
                         for slots in (rig.small.keys, rig.small.values)])  # fmt: skip

        rig.run(note)
        monkeypatch.undo()
        return seen, sizes

    ours, sizes = caches_after_steps(offloaded(1, capacity=2200, config=CONFIG))
    theirs, same_sizes = caches_after_steps(None)
    assert sizes == same_sizes
    assert len(sizes) == 3
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, z) for a, z in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seed_repeats_the_text_though_the_budget_changes_whatever_the_clock_says(dtype, monkeypatch):
    monkeypatch.setattr("minitri.decoding.autotuner.BUDGET_PERIOD", 4)
    monkeypatch.setattr("minitri.decoding.autotuner.BUDGET_EVIDENCE", 2.0)
    monkeypatch.setattr("minitri.decoding.autotuner.BUDGET_HYSTERESIS", 0.5)
    target = tiny_model(CONFIG).to(dtype)
    prompt, clock, now = random_prompt(CONFIG, 2100), random.Random(3), [0.0]

    def run() -> tuple[list[list[int]], list[int]]:
        full = FullCache.allocate(CONFIG, 1, 2300, dtype=dtype, device=CPU)
        rig = Rig(target, [prompt], draft=near_copy(target, 0.02).to(dtype), full=full, method="triforce", num_new=90,
                  sampling=WARM, seed=4, prefill_chunk=512)  # fmt: skip
        sizes = []
        return rig.run(lambda rig: sizes.append(rig.small.budgets[0])), sizes

    def erratic() -> float:
        now[0] += clock.random()
        return now[0]

    first = run()
    assert len(set(first[1])) > 1
    monkeypatch.setattr(time, "perf_counter", erratic)
    assert run() == first


def test_with_nothing_else_open_the_budget_is_not_tuned():
    """So rows of a batch stay independent of one another, and of the clock."""
    lengths = [500, 5000, 10**5]
    for settings in ({"method": "triforce", "gamma1": 2, "gamma2": 6}, {"method": "retrieval", "gamma2": 3}):
        speculation = SpeculationConfig(**settings)
        assert speculation.budgets_for(lengths) == [[speculation.budget_for(length) for length in lengths]]


BUDGETS = (512, 1024, 2048)


def tuner_after(rate: float, slot: float, num_rounds: int = 40, *, timed: bool = True) -> Tuner:
    """Of a machine on which a slot more costs a round of the retrieval level so many seconds."""
    costs = {"draft": 0.004, "retrieval": 0.040, "target": 0.100}

    def nominal(stage: str, num_guesses: float, budget: int) -> float:
        slots = slot * (budget - BUDGETS[1]) if stage == "retrieval" else 0
        return (costs[stage] + slots) * (1 + 0.04 * num_guesses)

    stages = {stage.name: stage for stage in measured(costs, {("retrieval", "draft"): 0.4, ("target", "draft"): 0.05})}
    for _ in range(num_rounds):
        stages["target"].recent.note("retrieval", num_tested=10, num_accepted=round(10 * rate))
    return Tuner(
        list(stages.values()), SpeculationConfig("triforce").plans, nominal, timed=timed, budgets=BUDGETS,
        budget=BUDGETS[1],
    )  # fmt: skip


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize(
    ("rate", "slot", "best"),
    [(0.7, 1e-6, 2048), (1.0, 30e-6, 512), (0.9, 17e-6, 1024)],
    ids=["slots are cheap", "slots are dear", "as it is"],
)
def test_the_budget_that_pays_is_chosen(rate, slot, best, timed):
    tuner = tuner_after(rate, slot, timed=timed)
    for _ in range(BUDGET_PERIOD - 1):
        tuner.choose()
        assert tuner.budget == 1024
    tuner.choose()
    assert tuner.budget == best


def test_no_budget_is_changed_without_evidence():
    tuner = tuner_after(0.1, 1e-6, num_rounds=2)
    assert tuner._stages["target"].recent.guesses["retrieval"][0] < BUDGET_EVIDENCE
    for _ in range(3 * BUDGET_PERIOD):
        tuner.choose()
    assert tuner.budget == 1024


def test_what_is_known_is_taken_along_to_another_budget():
    """Costs and the rate are at once what they were predicted to become; the next move waits until they are shown."""
    tuner = tuner_after(0.7, 5e-6)
    rate, costs = tuner._rate_with(2048, 0.7), [tuner._cost("retrieval", n, 2048) for n in (0, 3)]
    assert rate == pytest.approx(1 - 0.3 * 2**BUDGET_POWER)
    assert costs[0] == pytest.approx(0.040 + 5e-6 * 1024)
    for _ in range(BUDGET_PERIOD):
        tuner.choose()
    assert tuner.budget == 2048
    assert [tuner._cost("retrieval", n) for n in (0, 3)] == pytest.approx(costs)
    assert tuner.rate("target", "retrieval") == pytest.approx(rate, abs=0.02)
    for _ in range(3 * BUDGET_PERIOD):
        tuner.choose()
    assert tuner.budget == 2048
    assert tuner.rate("target", "retrieval") == pytest.approx(rate, abs=0.02)


def test_there_is_something_to_choose_from_and_it_is_never_too_near_nor_longer_than_half_the_prompt():
    for chunk_size in (8, 100):
        speculation = SpeculationConfig(chunk_size=chunk_size)
        for length in (1, 300, 1023, 1024, 5000, 16_000, 32_000, 125_000, 10**6):
            budgets = [rows[0] for rows in speculation.budgets_for([length])]
            start = speculation.budget_for(length)
            assert start in budgets
            assert (len(budgets) > 1) == (length >= 1024)
            assert all(1.4 * less < more for less, more in itertools.pairwise(budgets))
            assert all(budget <= max(start, length / 2 + chunk_size) for budget in budgets)
            assert all(256 <= budget < 4096 + chunk_size for budget in budgets)
    assert SpeculationConfig().budgets_for([32_000]) == [[1024], [2048], [4096]]
    assert SpeculationConfig().budgets_for([5000]) == [[312], [632], [1256], [2504]]
    assert SpeculationConfig(budget=64).budgets_for([100, 10**5]) == [[64, 64]]


def test_rows_of_a_batch_grow_and_shrink_together():
    for lengths in ([5000, 700], [3000, 8000], [2400, 4800], [8192, 9000], [3, 125_000, 1500]):
        choice = SpeculationConfig().budgets_for(lengths)
        assert len(choice) > 1
        assert list(map(SpeculationConfig().budget_for, lengths)) in choice
        for less, more in itertools.pairwise(choice):
            assert all(a <= b for a, b in zip(less, more, strict=True))
            assert sum(less) < sum(more)


def test_a_budget_that_no_text_can_fill_costs_what_can_be_filled(monkeypatch):
    seen = []
    monkeypatch.setattr(Tuner, "__init__", spy(Tuner.__init__, seen))
    target = tiny_model(CONFIG)
    for budget in (4096, 8 * 10**17):
        Rig(target, [random_prompt(CONFIG, 50)], method="auto", budget=budget)
    assert seen[0] == seen[1]
    assert seen[0]["budget"] < 200


def spy(method, seen: list):
    def noting(*args, **kwargs):
        seen.append({"budget": kwargs["budget"], "budgets": kwargs["budgets"]})
        return method(*args, **kwargs)

    return noting


@pytest.mark.parametrize(("method", "start"), [("triforce", 0), ("auto", 2)])
@pytest.mark.parametrize("power", [-0.3, -0.9])
@pytest.mark.parametrize(
    ("costs", "rates", "slot"),
    [((3.7, 40, 62), (0.51, 0.93), 2.5e-3), ((1.5, 9, 33), (0.47, 0.85), 2e-4), ((1.5, 9, 2500), (0.47, 0.85), 2e-4)],
    ids=["a CPU", "a GPU", "KV in host memory"],
)
def test_tuned_budgets_come_near_the_best_fixed_one(costs, rates, slot, power, method, start):
    """Simulated as in `test_tuning.py`, where rejections fall with another power than the tuner believes, over 1,024
    tokens. From a small one, at least half of what the best gains is gained; from the largest, little is lost. (`auto`
    starts higher: where the small cache is hardly used, nothing is learned of it.)"""
    budgets = (256, 512, 1024, 2048, 4096)

    def ms(budgets: tuple[int, ...], budget: int) -> float:
        settings = {"num_seeds": 4, "num_tokens": 1024, "budgets": budgets, "budget": budget, "power": power}
        return simulated_means(costs, rates, (method,), slot=slot, **settings)[method]

    fixed, (grown, shrunk) = (
        [ms((budget,), budget) for budget in budgets],
        [ms(budgets, budgets[i]) for i in (start, 4)],
    )
    best = min(fixed)
    print(f"{method}: {', '.join(f'{mean / best:.3f}' for mean in fixed)}; tuned from {budgets[start]} "
          f"{grown / best:.3f}, from 4096 {shrunk / best:.3f}")  # fmt: skip
    assert grown - best < 0.5 * (fixed[start] - best) + 0.05 * best
    assert shrunk < 1.07 * best
