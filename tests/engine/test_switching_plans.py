"""Method `auto`, and when it may follow the clock; its texts under random plans are in
`tests/test_properties.py`."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from minitri import Engine, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.core.decoding.autotuner import Autotuner
from minitri.core.model.execution import Execution
from minitri.core.settings import StepPlan
from minitri.core.shape import MemoryShape
from minitri.core.stack import may_use_clock
from tests.conftest import settings_of, tiny_engine
from tests.core.rigs import Rig, near_copy, random_prompt, tiny_config, tiny_model

AR, NAIVE = StepPlan("autoregressive"), StepPlan("naive", 2)


def forced(monkeypatch, plans) -> None:
    schedule = itertools.cycle(plans)

    def choose(tuner):
        tuner.plan = next(schedule)
        return tuner.plan

    monkeypatch.setattr(Autotuner, "choose", choose)


def test_a_drafter_that_was_left_out_for_long_knows_the_text_again(monkeypatch):
    """A drafter that is the target, with a window that holds everything, is always right. By a
    clock that is a second later whenever it is read, each call of a stage takes a second."""
    target = tiny_model(tiny_config())
    forced(monkeypatch, [AR] * 30 + [NAIVE] * 10)
    prompts, draft = [random_prompt(target.config, 20)], near_copy(target, 0.0)
    rig = Rig(target, prompts, draft=draft, num_new=55, num_recent_tokens=120)
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)
    rig.run()
    draft, _, full = rig.stats.stages
    assert (draft.seconds, full.seconds) == (draft.num_rounds / NAIVE.gamma1, full.num_rounds)
    assert 0 < rig.session.tuner.num_left <= NAIVE.gamma1 + 1  # before the last step
    assert rig.stats.stages[-1].num_tested_tokens >= 15
    assert rig.stats.stages[-1].acceptance_rate == 1


GREEDY = (SamplingParams(), False)
COUPLED = (SamplingParams(0.8, top_k=40, top_p=0.95), True)


@pytest.mark.parametrize("distribution", [GREEDY, COUPLED, (SamplingParams(1.0), False)])
def test_a_target_that_drafts_for_itself_is_always_right(distribution):
    """Every stage sees everything, so nothing may be rejected, at any temperature."""
    sampling, coupled = distribution
    target, prompts = tiny_engine(), [[5, 6, 7], list(range(10, 60)), [9], [4] * 20]
    settings = {"budget": 128, "num_recent_tokens": 200, "gamma1": 3, "gamma2": 6}
    how = settings_of("triforce", 40, sampling, coupled=coupled, **settings)
    *_, end = Engine(target.model, target.tokenizer, target.model).generate(prompts, **how)
    assert [level.acceptance_rate for level in end.stats.levels] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("dtype", "device", "is_row_invariant", "distribution", "how", "may"),
    [
        (torch.float32, "cpu", False, GREEDY, {}, True),
        (torch.float32, "cpu", False, GREEDY, {"is_open": True}, False),
        (torch.float32, "cpu", False, COUPLED, {}, True),
        (torch.float32, "cpu", True, (SamplingParams(0.8), False), {}, False),
        (torch.bfloat16, "cpu", False, GREEDY, {}, False),
        (torch.bfloat16, "cpu", True, GREEDY, {}, True),
        (torch.float32, "cuda", False, COUPLED, {}, False),
        (torch.bfloat16, "cuda", False, (SamplingParams(0.8), False), {"timed": True}, True),
    ],
)
def test_a_clock_chooses_plans_only_where_the_text_cannot_depend_on_them(
    dtype, device, is_row_invariant, distribution, how, may
):
    sampling, coupled = distribution
    speculation = SpeculationConfig("auto", coupled=coupled, timed="timed" in how)
    shape = MemoryShape((1,), sampling, GenerationConfig(4), speculation)
    execution = Execution(is_row_invariant=is_row_invariant)
    target = SimpleNamespace(dtype=dtype, device=torch.device(device), execution=execution)
    found = may_use_clock(SimpleNamespace(target=target), shape, is_open="is_open" in how)
    assert found == may
