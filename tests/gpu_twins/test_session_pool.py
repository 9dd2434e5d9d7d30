"""The session pool: keeps shapes and graphs for the next run, and texts it may begin with."""

import gc
import math

import pytest
import torch

from minitri import End, GenerationConfig, InputError, SamplingParams, SpeculationConfig, memory
from minitri.caches.prefixes import HeldRow
from minitri.gpu.graphs import GraphPool
from minitri.gpu.offload.offloaded_cache import OffloadedFullCache
from minitri.memory import MemoryShape
from minitri.settings import METHODS
from tests.cascades import random_prompt, tiny_engine
from tests.conftest import CPU
from tests.gpu_twins.conftest import as_on_a_gpu
from tests.gpu_twins.offload import offloaded
from tools.paper.baselines.policies import NAMES, policy_of

WARM = SamplingParams(0.9, 30, top_p=0.95, min_p=0.01)
SETTINGS = {"budget": 24, "num_recent_tokens": 40, "rebuild_stride": 5}
GAMMAS = {"gamma1": 2, "gamma2": 3}
TRIFORCE = SpeculationConfig("triforce", **GAMMAS, **SETTINGS)
NAIVE = SpeculationConfig("naive", gamma1=2, **SETTINGS)


@pytest.fixture
def pools(lengths_on_the_device, monkeypatch):
    """The pools of graphs that runs have made; engines behave as on a GPU."""
    made = []

    def graph_pool(device, *, wanted):
        made.append(GraphPool(CPU))
        return made[-1] if wanted else None

    monkeypatch.setattr(memory, "graph_pool", graph_pool)
    return made


def gpu_engine(**settings):
    engine = tiny_engine(**settings)
    for model in (engine.model, engine.draft):
        if model is not None:
            as_on_a_gpu(model)
    return engine


def say(engine, lengths, speculation, sampling=WARM, seed=0, num_new=24, **settings) -> tuple:
    """What a run over random prompts of these lengths says, and its counts."""
    prompts = [random_prompt(engine.config, n, seed=n + seed) for n in lengths]
    run = engine.generate(
        prompts,
        sampling=sampling,
        speculation=speculation,
        seed=seed,
        generation=GenerationConfig(max_new_tokens=num_new, ignore_eos=True, **settings),
    )
    ends = sorted((event for event in run if isinstance(event, End)), key=lambda end: end.row)
    stages = [
        (s.name, s.num_rounds, s.num_tested_tokens, s.num_accepted_tokens) for s in run.stats.stages
    ]
    return [end.token_ids for end in ends], stages, run.stats.num_rebuilds


@torch.inference_mode()
def spoil(session) -> None:
    """NaN wherever a number of the last text may have stayed, and no text to begin with."""
    session.prefix._ended = [HeldRow(session.full, b, [], 0) for b in range(session.shape.num_rows)]
    holders, small = [session.full], session.retrieval_cache
    if isinstance(session.full, OffloadedFullCache):
        holders += session.full.buffers
    holders += [small, small._policy] if small else []
    holders += [session.draft.cache] if session.draft else []
    tensors = [session.target.queries_LBTHD]
    for holder in holders:
        tensors += [value for value in vars(holder).values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        tensor.fill_(math.nan)


@pytest.mark.parametrize(
    ("method", "policy"),
    [(method, "retrieval") for method in METHODS]
    + [(method, policy) for method in ("retrieval", "triforce") for policy in NAMES[1:]],
)
def test_the_next_run_captures_nothing_and_says_what_it_would_have_said_first(
    method, policy, pools
):
    """Another temperature, other and shorter texts, after whatever the last run left: tokens,
    acceptance, rebuilds."""
    gammas = {} if method == "auto" else GAMMAS
    settings = {"method": method, "policy": policy_of(policy), **gammas, **SETTINGS}
    speculation = SpeculationConfig(**settings)
    engine = gpu_engine()
    say(engine, (90, 33), speculation, WARM)
    num_graphs = pools[0].num_graphs
    for lengths, sampling, coupled in (
        ((70, 5), SamplingParams(0.5, 30, top_p=0.8, min_p=0.1), False),
        ((90, 33), WARM, method != "auto"),  # which would follow the clock
        ((20, 41), SamplingParams(), False),
        ((20, 41), SamplingParams(3.0, 30, top_p=0.9, min_p=0.001), False),
    ):
        spoil(engine._pool._kept)
        wanted = SpeculationConfig(coupled=coupled, **settings)
        again, first = (say(it, lengths, wanted, sampling, seed=3) for it in (engine, gpu_engine()))
        assert again[0] == first[0]
        if method != "auto" or sampling.temperature:  # else what is chosen follows the clock
            assert again == first
        assert pools[0].num_graphs == num_graphs > 0
        assert len(pools) == 2  # that of the engine, and that of the fresh one
        pools.pop()


def host_everything(monkeypatch, engine, on_chip: int, batch_size: int) -> dict:
    """Has K and V put into host memory; the settings to ask for it."""
    monkeypatch.setattr(
        memory,
        "allocate_full_cache",
        lambda *settings: offloaded(on_chip, batch_size, config=engine.config),
    )
    return {"offload": True, "on_chip": on_chip}


@pytest.mark.parametrize("on_chip", [0, 1])
def test_kv_in_host_memory_is_kept_too(on_chip, pools, monkeypatch):
    engine, fresh = gpu_engine(), gpu_engine()
    settings = host_everything(monkeypatch, engine, on_chip, 2)
    say(engine, (300, 33), TRIFORCE, **settings)  # more than the ring holds
    spoil(engine._pool._kept)
    again = say(engine, (200, 150), TRIFORCE, seed=5, **settings)
    assert len(pools) == 1
    assert again == say(fresh, (200, 150), TRIFORCE, seed=5, **settings)


@pytest.mark.parametrize(
    ("lengths", "changes", "settings"),
    [
        ((91, 33), {}, {}),  # longer
        ((90,), {}, {}),  # fewer
        ((90, 33), {"gamma1": 3}, {}),
        ((90, 33), {"method": "naive"}, {}),
        ((90, 33), {"chunk_size": 4}, {}),
        ((90, 33), {}, {"sampling": SamplingParams(0.9)}),
        ((90, 33), {}, {"sampling": SamplingParams(0.9, 20, top_p=0.95, min_p=0.01)}),
        ((90, 33), {}, {"prefill_chunk": 2048}),
        ((90, 33), {}, {"sampling": SamplingParams(0.9, top_p=0.95)}),
        ((90, 33), {}, {"cuda_graphs": False}),
    ],
)
def test_what_does_not_suit_is_made_anew(lengths, changes, settings, pools):
    wanted = {"method": "triforce", **GAMMAS, **SETTINGS}
    engine = gpu_engine()
    say(engine, (90, 33), SpeculationConfig(**wanted), num_new=65)  # up to a whole stride of slots
    speculation = SpeculationConfig(**{**wanted, **changes})
    num_new = 128 if lengths[0] > 90 else 24
    got = say(engine, lengths, speculation, num_new=num_new, **settings)
    assert len(pools) == 2
    assert got == say(gpu_engine(), lengths, speculation, num_new=num_new, **settings)


def test_a_larger_budget_is_not_squeezed_in(pools):
    """Open budgets follow the prompts, so a longer prompt may need more slots than there are."""
    engine = gpu_engine()
    speculation = SpeculationConfig("retrieval", gamma2=3, num_recent_tokens=40)
    say(engine, (300,), speculation, num_new=200)
    kept = engine._pool._kept
    for length, fits in ((400, True), (1100, False)):
        shape = MemoryShape((length,), WARM, GenerationConfig(60), speculation)
        assert shape.capacity <= kept.full.capacity or not fits
        assert engine._pool._can_run(kept, shape) == fits


def begin(engine, length: int, num_events: int, speculation=TRIFORCE, sampling=WARM):
    """A run that is under way."""
    prompt = random_prompt(engine.config, length)
    run = engine.generate(prompt, sampling=sampling, speculation=speculation)
    for _ in range(num_events):
        next(run)
    return run


def test_a_run_that_is_left_or_collected_is_kept_and_one_that_fails_is_not(pools):
    engine = gpu_engine()
    begin(engine, 60, 12).close()
    kept = engine._pool._kept
    assert kept is not None
    say(engine, (40,), TRIFORCE, num_new=50)
    assert engine._pool._kept is kept
    run = begin(engine, 60, 2)
    del run
    gc.collect()
    assert engine._pool._kept is not None
    engine.model.norm.weight.fill_(math.nan)
    with pytest.raises(InputError, match="not finite"):
        say(engine, (40,), TRIFORCE, num_new=50)
    assert engine._pool._kept is None


def test_an_older_run_puts_nothing_in_the_place_of_a_newer_one_or_after_a_release(pools):
    engine = gpu_engine()
    older = begin(engine, 60, 1, NAIVE)
    say(engine, (40,), NAIVE)
    kept = engine._pool._kept
    older.close()
    assert engine._pool._kept is kept is not None
    left = begin(engine, 20, 1, NAIVE)
    engine.release()
    left.close()
    assert engine._pool._kept is None
    say(engine, (30,), NAIVE)
    engine.release()
    assert engine._pool._kept is None


def test_a_run_inside_inference_mode_leaves_what_one_outside_can_use(pools):
    speculation = SpeculationConfig("retrieval", policy_of("h2o"), gamma2=3, **SETTINGS)
    engine = gpu_engine()
    with torch.inference_mode():
        say(engine, (90, 33), speculation)
    say(engine, (90, 33), speculation, SamplingParams(0.5, 30, top_p=0.9, min_p=0.02))
    assert len(pools) == 1


def test_layers_that_were_fitted_to_one_run_are_not_kept(pools, monkeypatch):
    """With KV in host memory and no `on_chip` given; a shorter text may have room for all."""
    engine = gpu_engine()
    host_everything(monkeypatch, engine, 1, 1)
    say(engine, (90,), NAIVE, offload=True)
    assert engine._pool._kept is None


def test_two_runs_at_once_have_their_own(pools):
    engine, prompts = gpu_engine(), [[5, 6, 7] * 9, [8, 9] * 17]
    say(engine, (60,), TRIFORCE, num_new=60)
    how = {"speculation": TRIFORCE, "generation": GenerationConfig(30, ignore_eos=True)}
    alone, both = ([engine.generate(prompt, **how) for prompt in prompts] for _ in range(2))
    expected = {
        n: event.token_ids for n, run in enumerate(alone) for event in run if isinstance(event, End)
    }
    said: dict[int, tuple[int, ...]] = {}
    while len(said) < 2:
        for number, run in enumerate(both):
            if isinstance(event := next(run, None), End):
                said[number] = event.token_ids
    assert said == expected


def test_other_filters_capture_anew_though_the_target_was_not_captured(pools, monkeypatch):
    """With K and V in host memory the target runs eagerly, but its proposers were captured."""
    engine, fresh = gpu_engine(), gpu_engine()
    settings = host_everything(monkeypatch, engine, 1, 1)
    say(engine, (90,), TRIFORCE, SamplingParams(0.9, 2), **settings)
    again, first = (
        say(it, (90,), TRIFORCE, SamplingParams(0.9, top_p=0.9), seed=5, **settings)
        for it in (engine, fresh)
    )
    assert len(pools) == 3
    assert again == first


@pytest.mark.parametrize("length", [20, 60, 100])
def test_what_a_seed_writes_does_not_depend_on_the_run_before(length, pools):
    """Method auto follows predicted costs, which must be those of this run's own budget."""
    engine = gpu_engine()
    say(engine, (300,), SpeculationConfig(), num_new=100)
    again, first = (
        say(it, (length,), SpeculationConfig(), seed=7, num_new=60) for it in (engine, gpu_engine())
    )
    assert len(pools) == 2
    assert again == first


@pytest.mark.parametrize(("length", "budget"), [(30, None), (200, 4096)])
def test_a_budget_beyond_what_a_text_can_fill_does_not_capture_anew(length, budget, pools):
    engine = gpu_engine()
    for _ in range(3):
        say(engine, (length,), SpeculationConfig("triforce", **GAMMAS, budget=budget))
    assert len(pools) == 1
