"""Method `auto`; its texts under random plans are in `tests/test_properties.py`."""

import itertools
import random
import time

import pytest
import torch

from minitri import SamplingParams, SpeculationConfig
from minitri.core.decoding.autotuner import Autotuner
from minitri.core.settings import StepPlan
from tests.cascades import settings_of, tiny_engine
from tests.core.rigs import Rig, near_copy, random_prompt, tiny_config, tiny_model

AR, NAIVE = StepPlan("autoregressive"), StepPlan("naive", 2)
TRIFORCE = StepPlan("triforce", 1, 2)


def forced(monkeypatch, plans) -> None:
    schedule = itertools.cycle(plans)

    def choose(tuner):
        tuner.plan = next(schedule)
        return tuner.plan

    monkeypatch.setattr(Autotuner, "choose", choose)


def test_a_drafter_that_was_left_out_for_long_knows_the_text_again(monkeypatch):
    """A drafter that is the target, with a window that holds everything, is always right."""
    target = tiny_model(tiny_config())
    forced(monkeypatch, [AR] * 30 + [NAIVE] * 10)
    prompts, draft = [random_prompt(target.config, 20)], near_copy(target, 0.0)
    rig = Rig(target, prompts, draft=draft, num_new=55, num_recent_tokens=120)
    rig.run()
    assert rig.stats.stages[-1].num_tested_tokens >= 15
    assert rig.stats.stages[-1].acceptance_rate == 1


@pytest.mark.parametrize(
    ("noise", "sampling"), [(None, SamplingParams()), (0.02, SamplingParams(1.0, top_p=0.9))]
)
def test_auto_is_the_default_and_repeats_itself_whatever_the_clock_says(
    noise, sampling, monkeypatch
):
    engine = tiny_engine(noise=noise)
    prompt = random_prompt(engine.config, 150)

    def text() -> tuple[int, ...]:
        engine.release()  # a prompt that is partly known is read in other blocks, which may round
        return engine.complete(prompt, **settings_of("auto", 40, sampling, seed=4)).token_ids

    assert SpeculationConfig().method == "auto"
    first = text()
    clock, now = random.Random(3), [0.0]

    def erratic() -> float:
        now[0] += clock.random()
        return now[0]

    monkeypatch.setattr(time, "perf_counter", erratic)
    assert text() == first


def test_a_row_that_ended_costs_nothing_in_a_stage_that_was_left_out(monkeypatch):
    target, settings = tiny_model(tiny_config()), {"budget": 32, "num_recent_tokens": 20}
    forced(monkeypatch, [TRIFORCE, AR, AR, TRIFORCE])
    prompts = [random_prompt(target.config, n, seed=n) for n in (30, 40)]
    rig = Rig(target, prompts, draft=near_copy(target, 0.1), num_new=40, **settings)
    with torch.inference_mode():
        rig.start()
        for step in range(4):  # the second by the target alone
            if step == 2:
                rig.cascade.retire(1)
            rig.step()
    for runner in rig.runners.values():
        assert runner.cache.lengths[1] == 0
        assert runner.cache.lengths[0] > 0
