"""The session pool: keeps shapes and graphs for the next run, and texts it may begin with."""

import gc
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from minitri import GenerationConfig, InputError, Request, SamplingParams, SpeculationConfig, Token
from minitri.core import memory
from minitri.files import kv_store
from tests.apps.serve.conftest import PROMPT, complete, own_text, serving
from tests.conftest import texts_of, tiny_engine
from tests.core.rigs import GREEDY, random_prompt
from tests.devices.gpu_twins.conftest import CpuPool, as_on_a_gpu, offloaded

WARM = SamplingParams(0.9, 30, top_p=0.95, min_p=0.01)
COLD = SamplingParams(0.5, 30, top_p=0.8, min_p=0.1)
SETTINGS = {"budget": 24, "num_recent_tokens": 40, "rebuild_stride": 5}
FORCED = {"method": "triforce", "gamma1": 2, "gamma2": 3}
TRIFORCE = SpeculationConfig(**FORCED, **SETTINGS)
HOSTED = {"offload": True, "on_chip": 1}


@pytest.fixture
def pools(lengths_on_the_device, monkeypatch):
    """The pools of graphs that runs have made; a `gpu_engine` behaves as on a GPU."""
    made = []
    allocate = memory.allocate

    def allocate_on_gpu(models, shape, **how):
        made.append(CpuPool())
        is_on_gpu = hasattr(models.target.attend, "backend")
        graphs = made[-1] if is_on_gpu and shape.generation.cuda_graphs else None
        if shape.generation.offload and not how["full"]:
            size = (shape.num_rows, shape.capacity)
            how["full"] = offloaded(shape.generation.on_chip, *size, config=models.target.config)
        return allocate(models, shape, graphs=graphs, **how)

    monkeypatch.setattr(memory, "allocate", allocate_on_gpu)
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


@pytest.mark.parametrize(
    ("lengths", "changes", "settings", "num_pools"),
    [
        ((70, 5), {"coupled": True}, {"sampling": COLD}, 1),
        ((20, 41), {}, {"sampling": SamplingParams()}, 1),
        ((200, 33), {}, {}, 2),  # longer
        ((90,), {}, {}, 2),  # fewer
        ((90, 33), {"method": "naive"}, {}, 2),
        ((90, 33), {}, {"sampling": SamplingParams(0.9)}, 2),
        ((90, 33), {}, {"prefill_chunk": 2048}, 2),
        ((90, 33), {}, {"cuda_graphs": False}, 2),
    ],
)
def test_what_suits_is_taken_over_and_the_rest_is_allocated_again(
    lengths, changes, settings, num_pools, pools
):
    """After whatever the last run left: tokens, acceptance and rebuilds of a first run on a CPU."""
    engine = gpu_engine()
    begin(engine, (90, 33), 40).close()  # up to a whole stride of slots
    got = say(engine, lengths, replace(TRIFORCE, **changes), seed=3, **settings)
    assert len(pools) == num_pools
    assert got == say(tiny_engine(), lengths, replace(TRIFORCE, **changes), seed=3, **settings)


@pytest.mark.parametrize(("placement", "plan"), [({}, {}), (HOSTED, {}), (HOSTED, FORCED)])
def test_rows_of_any_filters_come_and_go_and_say_what_cpus_say(placement, plan, pools, recorder):
    """As a server's: five requests for two rows of an open run; one is cancelled. Captured passes
    serve all temperatures; penalties and other kinds of filters act outside. Alone: on a CPU."""
    engine, lengths = gpu_engine(), partial(GenerationConfig, ignore_eos=True, logprobs=0)
    kinds = (WARM, SamplingParams(1.0, 5), replace(COLD, presence_penalty=1), GREEDY, COLD)
    prompts = [random_prompt(engine.config, 20 + 9 * i) for i in range(5)]
    requests = [Request(prompts[i], i, kinds[i], lengths(8 + 4 * i)) for i in range(5)]
    how = {"speculation": SpeculationConfig(coupled=True, **plan, **SETTINGS)}
    plain = SpeculationConfig("autoregressive", coupled=True)
    ends = [tiny_engine().stream([it], speculation=plain).result() for it in requests]
    near = partial(pytest.approx, abs=1e-4)
    alone = [[(it.token_id, near(it.logprob)) for it in end.tokens] for end in ends]
    settings = {"sampling": WARM, "generation": GenerationConfig(reserve=200, **placement)}
    texts = [[] for _ in alone]
    with engine.open(batch_size=2, **settings, **how) as run:
        for number, event in enumerate(run):
            if number % 3 == 0 and requests:
                run.submit(requests.pop(0))
            if isinstance(event, Token):
                texts[event.row].append((event.token_id, event.logprob))
                if event.row == 1:
                    run.cancel(1)
            if [*map(len, texts)] == [8, 1, 16, 20, 24]:
                break
    assert texts == [alone[0], alone[1][:1], *alone[2:]]


def test_a_request_over_http_that_comes_while_another_decodes_says_what_a_cpu_says(pools):
    with serving(gpu_engine()) as server, server.held(4) as gate, ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(complete, server)]
        server.wait(lambda: gate.is_reached)
        asked.append(clients.submit(complete, server, prompt=PROMPT[9:]))
        server.wait_for(num_open=2)
        gate.set()
    texts = [it.result().choices[0].text for it in asked]
    assert texts == [own_text(tiny_engine(), prompt) for prompt in (PROMPT, PROMPT[9:])]


@pytest.mark.parametrize("placement", [{}, HOSTED])
def test_a_text_goes_on_from_files(placement, pools, recorder, tmp_path, monkeypatch):
    """Of a snapshot or a store, for which K and V that are still on their way are waited for."""
    monkeypatch.setattr(kv_store, "BLOCK", 32)
    engine, how = gpu_engine(), {"sampling": WARM, "speculation": TRIFORCE, "seed": 3}
    engine.model.execution = replace(engine.model.execution, identify=lambda: "its files")
    how["generation"] = GenerationConfig(8, ignore_eos=True, reserve=300, **placement)
    talk, ends = random_prompt(engine.config, 90), []
    open_store = partial(engine.open_kv_store, str(tmp_path), 1 << 30)
    open_store()
    talk += [*engine.complete(talk, **how).token_ids, 5]
    engine.save_kv(tmp_path / "x")
    for load in (lambda: None, lambda: engine.load_kv(tmp_path / "x"), open_store):
        engine.release()
        load()
        ends.append(engine.complete(talk, **how))
    assert ends[0].token_ids == ends[1].token_ids == ends[2].token_ids
    assert [end.row_stats.num_cached_tokens for end in ends] == [0, 82, 64]


def begin(engine, lengths, num_events: int):
    prompts = [random_prompt(engine.config, n) for n in lengths]
    run = engine.generate(prompts, sampling=WARM, speculation=TRIFORCE, max_new_tokens=65)
    for _ in range(num_events):
        next(run)
    return run


def test_a_run_that_is_left_or_collected_is_kept_and_one_that_fails_is_not(pools):
    """Runs that are older than what is kept, or that end after a release, are not kept either."""
    engine = gpu_engine()
    older = begin(engine, [60], 12)
    newer = begin(engine, [70], 12)
    assert not engine.held_tokens
    del newer
    gc.collect()
    older.close()
    begin(engine, [50], 0).close()  # which has read nothing
    assert engine.held_tokens[:70] == random_prompt(engine.config, 70)
    left = begin(engine, [20], 1)
    engine.release()
    left.close()
    assert not engine.held_tokens
    engine.model.norm.weight.fill_(math.nan)
    with pytest.raises(InputError, match="not finite"):
        say(engine, (40,), TRIFORCE, num_new=50)
    assert not engine.held_tokens
