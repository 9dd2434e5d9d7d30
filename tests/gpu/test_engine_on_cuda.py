"""The engine on a CUDA device: the same greedy tokens as on the CPU, and no memory kept after a
release."""

import pytest
import torch

import minitri
from minitri import End, GenerationConfig, Request, SamplingParams, SpeculationConfig
from minitri.gpu.attention_backends import attend_fused
from minitri.gpu.graphs import clear_workspaces
from minitri.model.attention import attend_math
from minitri.settings import METHODS
from tests.model.test_attention import random_case
from tools.paper.baselines.policies import NAMES, policy_of


def tokens(engine, prompts, speculation=SpeculationConfig(), sampling=SamplingParams()):  # noqa: B008 (frozen)
    generation = GenerationConfig(max_new_tokens=24, ignore_eos=True)
    events = engine.generate(
        prompts, generation=generation, speculation=speculation, sampling=sampling, seed=5
    )
    return {event.row: event.token_ids for event in events if isinstance(event, End)}


def test_greedy_tokens_equal_those_of_the_cpu(folder, engine):
    on_gpu = minitri.load(str(folder), dtype="float32", device="cuda")
    prompts = [[5, 6, 7], list(range(10, 200)), [9]]
    assert tokens(on_gpu, prompts) == tokens(engine, prompts)


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("coupled", [False, True])
def test_every_method_gives_the_tokens_of_the_cpu(folder, engine, method, policy, coupled):
    """Greedy and coupled, with the target as its own drafter, in float32."""
    on_gpu = minitri.load(str(folder), draft=str(folder), dtype="float32", device="cuda")
    prompts = [[5, 6, 7], list(range(10, 200)), [9]]
    speculation = SpeculationConfig(
        method, policy_of(policy), budget=32, num_recent_tokens=12, coupled=coupled
    )
    sampling = SamplingParams(0.8, top_p=0.9) if coupled else SamplingParams()
    alone = SpeculationConfig("autoregressive", coupled=coupled)
    assert tokens(on_gpu, prompts, speculation, sampling) == tokens(
        engine, prompts, alone, sampling
    )


@pytest.mark.parametrize("tree", ["4", "2x2"])
@pytest.mark.parametrize("method", ["naive", "retrieval", "triforce"])
@pytest.mark.parametrize("placement", [{}, {"offload": True, "on_chip": 0}])
def test_trees_give_the_tokens_of_the_cpu(folder, engine, method, tree, placement):
    """Accepted paths are moved together in the full, the retrieval and the offloaded cache."""
    on_gpu = minitri.load(str(folder), draft=str(folder), dtype="float32", device="cuda")
    prompts = [[5, 6, 7], list(range(10, 200)), [9]]
    generation = GenerationConfig(max_new_tokens=24, ignore_eos=True, **placement)
    speculation = SpeculationConfig(method, budget=32, num_recent_tokens=12, tree=tree)
    events = on_gpu.generate(prompts, generation=generation, speculation=speculation, seed=5)
    found = {event.row: event.token_ids for event in events if isinstance(event, End)}
    assert found == tokens(engine, prompts, SpeculationConfig("autoregressive"))


def test_a_stream_of_requests_gives_each_its_own_text(folder, engine):
    """Five through two places: rows that end make room for the next ones."""
    on_gpu = minitri.load(str(folder), draft=str(folder), dtype="float32", device="cuda")
    prompts = [[5, 6, 7], list(range(10, 150)), [9], [8] * 30, list(range(40, 60))]
    requests = [
        Request(prompt, seed=5, generation=GenerationConfig(8 + 4 * number, ignore_eos=True))
        for number, prompt in enumerate(prompts)
    ]
    speculation = SpeculationConfig("triforce", budget=32, num_recent_tokens=12)
    events = on_gpu.stream(requests, batch_size=2, speculation=speculation)
    found = {event.row: event.token_ids for event in events if isinstance(event, End)}
    for number, request in enumerate(requests):
        alone = engine.complete(
            request.prompt,
            generation=request.generation,
            speculation=SpeculationConfig("autoregressive"),
        )
        assert found[number] == alone.token_ids


@pytest.mark.parametrize("T", [1, 2, 8, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_on_cuda_equals_the_oracle(T, dtype):
    q, k, v, lengths = random_case(T, (0, 700, 33), H=8, K=2, D=64, dtype=dtype)
    exact = attend_math(q.double(), k.double(), v.double(), lengths)
    got = attend_fused(q.cuda(), k.cuda(), v.cuda(), lengths).double().cpu()
    assert (got - exact).abs().max() < 0.02


@pytest.mark.parametrize("method", METHODS)
def test_the_next_run_captures_nothing_and_says_what_it_would_have_said_first(folder, method):
    engine, fresh = (
        minitri.load(str(folder), draft=str(folder), dtype="float32", device="cuda")
        for _ in range(2)
    )
    speculation = SpeculationConfig(method, budget=32, num_recent_tokens=12, coupled=True)
    tokens(engine, [list(range(10, 200))], speculation, SamplingParams(1.5, top_p=0.9))
    kept = engine._pool._kept
    steps = dict(kept.target.captured.by_size)
    for sampling in (SamplingParams(), SamplingParams(0.7, top_p=0.8)):
        again = tokens(engine, [list(range(50, 150))], speculation, sampling)
        assert engine._pool._kept is kept
        assert kept.target.captured.by_size == steps
        assert again == tokens(fresh, [list(range(50, 150))], speculation, sampling)
        fresh.release()


def test_a_closed_run_frees_its_cache_when_the_engine_is_told_to(folder):
    engine = minitri.load(str(folder), dtype="bfloat16", device="cuda")
    for _ in engine.generate(
        [5], generation=GenerationConfig(max_new_tokens=3)
    ):  # libraries take what they keep
        pass
    engine.release()
    clear_workspaces()  # cuBLAS's, of which every capture drops what there is
    before = torch.cuda.memory_allocated()
    run = engine.generate([[5] * 400] * 64, generation=GenerationConfig(max_new_tokens=50))
    next(run)
    assert run.stats.kv_cache_bytes > 4 << 20
    run.close()
    engine.release()
    clear_workspaces()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
