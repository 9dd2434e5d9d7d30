"""The session pool: keeps shapes and graphs for the next run, and texts it may begin with."""

import gc
import math
from dataclasses import replace

import pytest
import torch

from minitri import GenerationConfig, InputError, SamplingParams, SpeculationConfig
from minitri.core import memory
from minitri.core.graphs import GraphPool
from minitri.core.settings import METHODS
from tests.conftest import texts_of, tiny_engine
from tests.core.rigs import CPU, random_prompt
from tests.devices.gpu_twins.conftest import as_on_a_gpu

WARM = SamplingParams(0.9, 30, top_p=0.95, min_p=0.01)
SETTINGS = {"budget": 24, "num_recent_tokens": 40, "rebuild_stride": 5}
GAMMAS = {"gamma1": 2, "gamma2": 3}
TRIFORCE = SpeculationConfig("triforce", **GAMMAS, **SETTINGS)


@pytest.fixture
def pools(lengths_on_the_device, monkeypatch):
    """The pools of graphs that runs have made; engines behave as on a GPU."""
    made = []

    def graph_pool(device, *, wanted):
        made.append(GraphPool(CPU))
        return made[-1] if wanted else None

    monkeypatch.setattr(memory, "graph_pool", graph_pool)
    return made


def gpu_engine():
    engine = tiny_engine()
    for model in (engine.model, engine.models.draft):
        as_on_a_gpu(model)
    return engine


def say(engine, lengths, speculation, sampling=WARM, seed=0, num_new=16, **settings) -> tuple:
    """What a run over random prompts of these lengths says, and its counts."""
    prompts = [random_prompt(engine.config, n, seed=n + seed) for n in lengths]
    how = {"sampling": sampling, "speculation": speculation, "seed": seed}
    how["generation"] = GenerationConfig(num_new, ignore_eos=True, **settings)
    run = engine.generate(prompts, **how)
    texts, stages = texts_of(run), run.stats.stages
    counts = [(it.num_rounds, it.num_tested_tokens, it.num_accepted_tokens) for it in stages]
    return texts, counts, run.stats.num_rebuilds


@pytest.mark.parametrize("method", METHODS)
def test_the_next_run_takes_over_memory_and_says_what_it_would_have_said_first(method, pools):
    """At another temperature, after whatever the last run left: tokens, acceptance, rebuilds."""
    gammas = {} if method == "auto" else GAMMAS
    settings = {"method": method, **gammas, **SETTINGS}
    engine, other = gpu_engine(), gpu_engine()
    with torch.inference_mode():  # others outside can use what it leaves
        say(engine, (90, 33), SpeculationConfig(**settings), WARM)
    for lengths, sampling, coupled in (
        ((70, 5), SamplingParams(0.5, 30, top_p=0.8, min_p=0.1), False),
        ((20, 41), SamplingParams(), False),
        ((90, 33), WARM, method != "auto"),  # which would follow the clock
    ):
        other.release()
        wanted = SpeculationConfig(coupled=coupled, **settings)
        again, first = (say(it, lengths, wanted, sampling, seed=3) for it in (engine, other))
        assert again[0] == first[0]
        if method != "auto" or sampling.temperature:  # else what is chosen follows the clock
            assert again == first
        assert len(pools) == 2  # that of the engine, and that of the other one
        pools.pop()


@pytest.mark.parametrize(
    ("lengths", "changes", "settings"),
    [
        ((200, 33), {}, {}),  # longer
        ((90,), {}, {}),  # fewer
        ((90, 33), {"gamma1": 3}, {}),
        ((90, 33), {"method": "naive"}, {}),
        ((90, 33), {}, {"sampling": SamplingParams(0.9)}),
        ((90, 33), {}, {"prefill_chunk": 2048}),
        ((90, 33), {}, {"cuda_graphs": False}),
    ],
)
def test_what_does_not_suit_is_allocated_again(lengths, changes, settings, pools):
    engine = gpu_engine()
    begin(engine, (90, 33), 1).close()  # up to a whole stride of slots
    got = say(engine, lengths, replace(TRIFORCE, **changes), **settings)
    assert len(pools) == 2
    engine.release()
    assert got == say(engine, lengths, replace(TRIFORCE, **changes), **settings)


def begin(engine, lengths, num_events: int):
    """A run that is under way."""
    prompts = [random_prompt(engine.config, n) for n in lengths]
    how = {"sampling": WARM, "generation": GenerationConfig(65), "speculation": TRIFORCE}
    run = engine.generate(prompts, **how)
    for _ in range(num_events):
        next(run)
    return run


def test_a_run_that_is_left_or_collected_is_kept_and_one_that_fails_is_not(pools):
    """Nor one that is older than what is kept, or that ends after a release."""
    engine = gpu_engine()
    older = begin(engine, [60], 12)
    newer = begin(engine, [70], 12)
    assert not engine.held_tokens
    del newer
    gc.collect()
    older.close()
    assert engine.held_tokens[:70] == random_prompt(engine.config, 70)
    left = begin(engine, [20], 1)
    engine.release()
    left.close()
    assert not engine.held_tokens
    engine.model.norm.weight.fill_(math.nan)
    with pytest.raises(InputError, match="not finite"):
        say(engine, (40,), TRIFORCE, num_new=50)
    assert not engine.held_tokens
