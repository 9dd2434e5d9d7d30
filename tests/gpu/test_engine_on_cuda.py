"""The engine on a CUDA device, in float32: the tokens of the CPU, wherever K and V are, and no
memory kept after a release."""

import pytest
import torch

import minitri
from minitri import End, GenerationConfig, Request, SamplingParams, SpeculationConfig
from minitri.core.graphs import clear_workspaces
from tests.conftest import write_hf_folder

PROMPTS = [[5, 6, 7], list(range(10, 200)), [9]]
SMALL = {"budget": 32, "num_recent_tokens": 12, "rebuild_stride": 4}
GREEDY = SamplingParams()
WARM = SamplingParams(0.8, top_p=0.9)
HOSTED = {"offload": True, "on_chip": 2}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Five layers, so that staging buffers change their layer in every pass."""
    return write_hf_folder(tmp_path_factory.mktemp("models") / "deep", num_hidden_layers=5)


@pytest.fixture(scope="module")
def engines(deep, folder):
    """On the GPU and on the CPU."""
    how = {"draft": str(folder), "dtype": "float32"}
    return [minitri.load(str(deep), device=device, **how) for device in ("cuda", "cpu")]


def tokens(engine, speculation, sampling=GREEDY, prompts=PROMPTS, **placement):
    generation = GenerationConfig(24, ignore_eos=True, **placement)
    how = {"generation": generation, "speculation": speculation, "sampling": sampling, "seed": 5}
    events = engine.generate(prompts, **how)
    return {event.row: event.token_ids for event in events if isinstance(event, End)}


@pytest.mark.takes(seconds=20, gib=2)
@pytest.mark.parametrize(
    ("changes", "sampling", "placement"),
    [
        ({"method": "autoregressive"}, GREEDY, {}),
        ({"method": "auto"}, WARM, {}),
        ({"method": "naive"}, GREEDY, {"cuda_graphs": False}),
        ({"method": "retrieval"}, WARM, {}),
        ({"method": "triforce"}, GREEDY, {}),
        ({"method": "triforce", "tree": "2x2"}, WARM, {}),
        ({"method": "naive"}, WARM, HOSTED),
        ({"method": "retrieval"}, GREEDY, {"offload": True, "on_chip": 0}),
        ({"method": "triforce"}, WARM, HOSTED),
    ],
)
def test_every_method_gives_the_tokens_of_the_cpu(engines, changes, sampling, placement):
    """Greedy or coupled; the retrieval cache is rebuilt every few tokens, of layers that visit
    the device. The next run, at another temperature, captures nothing and says what it would have
    said first."""
    coupled = sampling is WARM
    on_gpu, on_cpu = engines
    speculation = SpeculationConfig(**changes, coupled=coupled, **SMALL)
    alone = SpeculationConfig("autoregressive", coupled=coupled)
    assert tokens(on_gpu, speculation, sampling, **placement) == tokens(on_cpu, alone, sampling)
    kept = on_gpu._pool._kept
    other = SamplingParams(0.5, top_p=0.8) if coupled else GREEDY
    again = tokens(on_gpu, speculation, other, PROMPTS[::-1], **placement)
    assert on_gpu._pool._kept is kept
    assert again == tokens(on_cpu, alone, other, PROMPTS[::-1])


@pytest.mark.takes(seconds=20, gib=2)
def test_a_stream_of_requests_gives_each_its_own_text(engines):
    """Five through two places: rows that end make room for the next ones."""
    on_gpu, on_cpu = engines
    requests = [
        Request(prompt, 5, generation=GenerationConfig(8 + 4 * number, ignore_eos=True))
        for number, prompt in enumerate([*PROMPTS, [8] * 30, list(range(40, 60))])
    ]
    speculation = SpeculationConfig("triforce", **SMALL)
    events = on_gpu.stream(requests, batch_size=2, speculation=speculation)
    found = {event.row: event.token_ids for event in events if isinstance(event, End)}
    for number, request in enumerate(requests):
        how = {"generation": request.generation, "speculation": False}
        assert found[number] == on_cpu.complete(request.prompt, **how).token_ids


@pytest.mark.takes(seconds=30, gib=2)
def test_a_closed_run_frees_its_cache_when_the_engine_is_told_to(folder):
    engine = minitri.load(str(folder), dtype="bfloat16", device="cuda")
    tokens(engine, SpeculationConfig())  # libraries take what they keep
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
