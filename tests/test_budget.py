"""The budget of the retrieval cache may change while a text is written: the cache follows, and the tuner knows when."""

from __future__ import annotations

import itertools

import pytest
import torch

from minitri import SpeculationConfig
from minitri.stats import LevelStats
from minitri.tuning import BUDGET_EVIDENCE, BUDGET_PERIOD, BUDGET_POWER, Tuner
from tests.cascades import GREEDY, WARM, Rig, near_copy, plain_tokens, random_prompt
from tests.conftest import tiny_config, tiny_model
from tests.test_offloaded_cache import offloaded
from tests.test_retrieval_cache import Bench, check_build
from tests.test_tuning import measured, simulated_means

PROMPT_LENGTHS = (3, 700, 1100)  # budgets from 256 to 256, 352 and 552
CONFIG = tiny_config(num_layers=5, context_length=2048)


@pytest.mark.parametrize("policy", ["retrieval", "topk"])
@pytest.mark.parametrize("sizes", [(64, 32), (64, 128, 64), (64, 24, 128, 32)])
def test_another_budget_holds_from_the_next_choice_on(policy, sizes):
    bench = Bench(policy, budget=sizes[0], most=max(sizes), num_sink_tokens=8)
    bench.read(200)
    assert bench.commit() == 1
    for budget in sizes[1:]:
        assert bench.commit(3) == 0
        bench.cache.resize([budget])
        assert bench.cache.lengths == bench.cache.budgets != [budget]
        assert bench.commit(2) == 1
        assert bench.cache.lengths == bench.cache.budgets == [budget]
        M = bench.policy.unit
        sinks, recent = 8 // M, min(8 // M, max(1, budget // M // 4))
        check_build(bench, policy, budget=budget, M=M, sinks=sinks, recent=recent, count=2)
        assert bench.commit(4) == 0
        bench.held()


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
def test_changing_budgets_change_no_token(method, sampling, coupled, monkeypatch):
    target = tiny_model(CONFIG)
    draft = near_copy(target, 0.02)
    prompts = [random_prompt(CONFIG, n, seed=n) for n in PROMPT_LENGTHS]
    settings = {"num_new": 40, "sampling": sampling, "coupled": coupled, "seed": 3, "prefill_chunk": 512}
    expected = plain_tokens(target, prompts, **settings)
    seen = resize_now_and_then(monkeypatch, (0, 2, 1))
    rig = Rig(target, prompts, draft=draft, method=method, **settings)
    assert rig.run() == expected
    assert len(set(seen)) == 3
    assert rig.stats.num_rebuilds > 4


def test_changing_budgets_over_hosted_kv_leave_the_same_cache(monkeypatch):
    """Chosen anew while each layer is staged, or afterwards: to the bit."""
    target, prompts = tiny_model(CONFIG), [random_prompt(CONFIG, n, seed=n) for n in PROMPT_LENGTHS]
    settings = {"method": "retrieval", "num_new": 30, "sampling": WARM, "prefill_chunk": 512}

    def caches_after_steps(full) -> list:
        resize_now_and_then(monkeypatch, (0, 2, 1))
        rig = Rig(target, prompts, full=full, **settings)
        seen = []

        def note(rig) -> None:
            seen.append([slots[:, b, :, :length].clone() for b, length in enumerate(rig.small.lengths)
                         for slots in (rig.small.keys, rig.small.values)])  # fmt: skip

        rig.run(note)
        monkeypatch.undo()
        return seen

    ours = caches_after_steps(offloaded(1, capacity=1280))
    theirs = caches_after_steps(None)
    assert len(ours) == len(theirs)
    assert all(
        torch.equal(a, z) for one, other in zip(ours, theirs, strict=True) for a, z in zip(one, other, strict=True)
    )


BUDGETS = (512, 1024, 2048)


def tuner_after(rate: float, slot: float, num_rounds: int = 40, *, timed: bool = True) -> Tuner:
    """Of a machine on which a slot more costs a round of the retrieval level so many seconds, and half of whose cost is
    not the slots'."""
    costs = {"draft": 0.004, "retrieval": 0.040, "target": 0.100}

    def nominal(stage: str, num_guesses: float, budget: int) -> float:
        return costs[stage] + (slot * (budget - BUDGETS[1]) if stage == "retrieval" else 0)

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
    for _ in range(BUDGET_PERIOD):
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
    """Rates and costs are at once what they were predicted to become: the next choice does not start from nothing."""
    tuner = tuner_after(0.7, 5e-6)
    rate, cost = tuner._rate_with(2048, 0.7), tuner._cost("retrieval", 3, 2048)
    assert rate == pytest.approx(1 - 0.3 * 2**BUDGET_POWER)
    assert cost == pytest.approx(0.040 + 5e-6 * 1024)
    for _ in range(BUDGET_PERIOD + 1):
        tuner.choose()
    assert tuner.budget == 2048
    tested, accepted = tuner._stages["target"].recent.guesses["retrieval"]
    assert accepted / tested == pytest.approx(rate, abs=0.02)
    assert tuner._cost("retrieval", 3) == pytest.approx(cost)
    assert tuner._rate_with(1024, tuner._rate_with(2048, 0.7)) != 0.7  # from where it stands now


def test_rounds_never_become_cheaper_than_half():
    recent = LevelStats("retrieval").recent
    recent.note_time(0, 1.0)
    recent.is_different(-0.9)
    assert recent.seconds_of_round(0) == 0.5


def test_budgets_to_choose_from_are_shorter_than_the_prompt_or_the_one_it_begins_with():
    speculation = SpeculationConfig(chunk_size=8)
    for lengths in ([1], [300], [511], [1025], [5000, 700], [10**6, 40]):
        choice = speculation.budgets_for(lengths)
        assert list(choice) == sorted(choice)
        assert sum(map(speculation.budget_for, lengths)) in choice
        for rows in choice.values():
            for length, budget in zip(lengths, rows, strict=True):
                assert budget == speculation.budget_for(length) or budget < length
                assert budget <= 4096
    assert SpeculationConfig(budget=64).budgets_for([100, 10**5]) == {128: [64, 64]}


@pytest.mark.parametrize(
    ("costs", "rates", "slot"),
    [((3.7, 40, 62), (0.51, 0.93), 2.5e-3), ((1.5, 9, 33), (0.47, 0.85), 2e-4), ((1.5, 9, 2500), (0.47, 0.85), 2e-4)],
    ids=["a CPU", "a GPU", "KV in host memory"],
)
def test_tuned_budgets_come_near_the_best_fixed_one(costs, rates, slot):
    """Simulated as in `test_tuning.py`, over 512 tokens, what it takes to find out included."""
    means = {
        budgets: simulated_means(costs, rates, ("triforce",), num_seeds=8, num_tokens=512, budgets=budgets, slot=slot)
        for budgets in ((512,), (1024,), (2048,), (4096,), (256, 512, 1024, 2048, 4096))
    }
    *fixed, tuned = (mean["triforce"] for mean in means.values())
    print(f"fixed {', '.join(f'{mean / min(fixed):.3f}' for mean in fixed)}; tuned {tuned / min(fixed):.3f}")
    assert tuned < 1.12 * min(fixed)
    assert tuned < 0.97 * max(fixed)
