"""The session pool: keeps shapes and graphs for the next run, and texts it may begin with."""

import gc
import math

import pytest
import torch

from minitri import End, GenerationConfig, InputError, SamplingParams, SpeculationConfig
from minitri.core import memory
from minitri.core.caches.full import HeldRow
from minitri.core.graphs import GraphPool
from minitri.core.offload.offloaded_cache import OffloadedFullCache
from minitri.core.settings import METHODS
from minitri.core.shape import MemoryShape
from tests.cascades import tiny_engine
from tests.core.rigs import CPU, random_prompt
from tests.devices.gpu_twins.conftest import as_on_a_gpu
from tests.devices.gpu_twins.offload import offloaded

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


def gpu_engine(**settings):
    engine = tiny_engine(**settings)
    for model in (engine.model, engine.models.draft):
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
    session.prefix._ended = [HeldRow(session.full, b, []) for b in range(session.shape.num_rows)]
    holders, small = [session.full], session.retrieval_cache
    if isinstance(session.full, OffloadedFullCache):
        holders += session.full.buffers
    holders += [small, small._policy] if small else []
    holders += [session.draft.cache] if session.draft else []
    tensors = []
    for holder in holders:
        tensors += [value for value in vars(holder).values() if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        tensor.fill_(math.nan)


def count_passes(pool):
    """Captured passes of the target; rounds of a drafter and verdicts are captured when needed."""
    return sum(getattr(key[0], "__name__", "") == "forward" for key in pool._captured)


@pytest.mark.parametrize("method", METHODS)
def test_the_next_run_captures_no_pass_and_says_what_it_would_have_said_first(method, pools):
    """Another temperature, other and shorter texts, after whatever the last run left: tokens,
    acceptance, rebuilds."""
    gammas = {} if method == "auto" else GAMMAS
    settings = {"method": method, **gammas, **SETTINGS}
    speculation = SpeculationConfig(**settings)
    engine = gpu_engine()
    with torch.inference_mode():  # others outside can use what it leaves
        say(engine, (90, 33), speculation, WARM)
    num_passes = count_passes(pools[0])
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
        assert count_passes(pools[0]) == num_passes > 0
        assert len(pools) == 2  # that of the engine, and that of the fresh one
        pools.pop()


@pytest.mark.parametrize(
    ("placement", "sampling", "num_pools"),
    [
        ({"on_chip": 0}, WARM, 1),
        ({"on_chip": 1}, WARM, 1),
        ({"on_chip": 1}, SamplingParams(0.9, top_p=0.9), 2),  # the target runs eagerly
        ({}, WARM, 2),  # layers that were fitted to one run
    ],
)
def test_kv_in_host_memory_is_kept_too(placement, sampling, num_pools, pools, monkeypatch):
    """If where it is was given; its proposers were captured with filters, though."""
    engine, fresh = gpu_engine(), gpu_engine()
    monkeypatch.setattr(
        memory,
        "allocate_full_cache",
        lambda *_: offloaded(placement.get("on_chip", 1), 2, config=engine.config),
    )
    settings = {"offload": True, **placement}
    say(engine, (300, 33), TRIFORCE, **settings)  # more than the ring holds
    if num_pools == 1:
        spoil(engine._pool._kept)
    again = say(engine, (200, 150), TRIFORCE, sampling, seed=5, **settings)
    assert len(pools) == num_pools
    assert again == say(fresh, (200, 150), TRIFORCE, sampling, seed=5, **settings)


@pytest.mark.parametrize(
    ("lengths", "changes", "settings"),
    [
        ((91, 33), {}, {}),  # longer
        ((90,), {}, {}),  # fewer
        ((90, 33), {"gamma1": 3}, {}),
        ((90, 33), {"method": "naive"}, {}),
        ((90, 33), {"chunk_size": 4}, {}),
        ((90, 33), {}, {"sampling": SamplingParams(0.9)}),
        ((90, 33), {}, {"prefill_chunk": 2048}),
        ((90, 33), {}, {"cuda_graphs": False}),
    ],
)
def test_what_does_not_suit_is_allocated_again(lengths, changes, settings, pools):
    wanted = {"method": "triforce", **GAMMAS, **SETTINGS}
    engine = gpu_engine()
    say(engine, (90, 33), SpeculationConfig(**wanted), num_new=65)  # up to a whole stride of slots
    speculation = SpeculationConfig(**{**wanted, **changes})
    num_new = 128 if lengths[0] > 90 else 24
    got = say(engine, lengths, speculation, num_new=num_new, **settings)
    assert len(pools) == 2
    assert got == say(gpu_engine(), lengths, speculation, num_new=num_new, **settings)


def begin(engine, length: int, num_events: int):
    """A run that is under way."""
    run = engine.generate(random_prompt(engine.config, length), speculation=TRIFORCE)
    for _ in range(num_events):
        next(run)
    return run


def test_a_run_that_is_left_or_collected_is_kept_and_one_that_fails_is_not(pools):
    """Nor one that is older than what is kept, or that ends after a release."""
    engine = gpu_engine()
    begin(engine, 60, 12).close()
    kept = engine._pool._kept
    assert kept is not None
    older = begin(engine, 60, 2)
    newer = begin(engine, 60, 2)
    assert engine._pool._kept is None
    del newer
    gc.collect()
    kept = engine._pool._kept
    older.close()
    assert engine._pool._kept is kept is not None
    left = begin(engine, 20, 1)
    engine.release()
    left.close()
    assert engine._pool._kept is None
    engine.model.norm.weight.fill_(math.nan)
    with pytest.raises(InputError, match="not finite"):
        say(engine, (40,), TRIFORCE, num_new=50)
    assert engine._pool._kept is None


@pytest.mark.parametrize("length", [20, 100])
def test_what_a_seed_writes_does_not_depend_on_the_run_before(length, pools):
    """Method auto follows predicted costs, which must be those of this run's own budget. A larger
    one, which is open and follows the prompt, is not squeezed in."""
    engine = gpu_engine()
    say(engine, (300,), SpeculationConfig(), num_new=100)
    larger = MemoryShape((1100,), WARM, GenerationConfig(60), SpeculationConfig())
    assert not engine._pool._can_run(engine._pool._kept, larger)
    again, first = (
        say(it, (length,), SpeculationConfig(), seed=7, num_new=60) for it in (engine, gpu_engine())
    )
    assert len(pools) == 2
    assert again == first


@pytest.mark.parametrize(("length", "budget"), [(30, None), (200, 4096)])
def test_a_budget_beyond_what_a_text_can_fill_captures_nothing_more(length, budget, pools):
    engine = gpu_engine()
    for _ in range(3):
        say(engine, (length,), SpeculationConfig("triforce", **GAMMAS, budget=budget))
    assert len(pools) == 1
