"""The engine on a CUDA device, in float32, has the tokens of the CPU; a release frees memory."""

import pytest
import torch

import minitri
from minitri import GenerationConfig, Request, SamplingParams, SpeculationConfig
from tests.conftest import settings_of, texts_of, write_hf_folder
from tests.core.rigs import GREEDY

PROMPTS = [[5, 6, 7], list(range(10, 200)), [9]]
SMALL = {"budget": 32, "num_recent_tokens": 12, "rebuild_stride": 4}
WARM = SamplingParams(0.8, top_p=0.9)
SHAPED = SamplingParams(repetition_penalty=1.5, presence_penalty=0.5)
HOSTED = {"offload": True, "on_chip": 2}


@pytest.fixture(scope="module")
def engines(folder, tmp_path_factory):
    """Engines on the GPU and on the CPU. Staging buffers of five layers change theirs in a pass."""
    deep = write_hf_folder(tmp_path_factory.mktemp("models") / "deep", num_hidden_layers=5)
    how = {"draft": str(folder), "dtype": "float32"}
    return [minitri.load(str(deep), device=device, **how) for device in ("cuda", "cpu")]


@pytest.mark.takes(seconds=20, gib=2)
@pytest.mark.parametrize(
    ("method", "sampling", "placement", "speculation"),
    [
        ("auto", WARM, {}, {}),
        ("naive", GREEDY, {"cuda_graphs": False}, {}),
        ("retrieval", WARM, {}, {}),
        ("triforce", SHAPED, {}, {}),
        ("triforce", WARM, {}, {"tree": "2x2"}),
        ("retrieval", GREEDY, {"offload": True, "on_chip": 0}, {}),
        ("triforce", WARM, HOSTED, {}),
    ],
)
def test_every_method_gives_the_tokens_of_the_cpu(
    engines, method, sampling, placement, speculation
):
    """Greedy or coupled, with rebuilds of layers that visit the device. A row that ends makes room
    for the third prompt. The next run, at another temperature, captures nothing."""
    on_gpu, on_cpu = engines
    coupled = sampling is WARM
    other = SamplingParams(0.5, top_p=0.8) if coupled else sampling
    kept = set()
    for params, prompts in ((sampling, PROMPTS), (other, PROMPTS[::-1])):
        how = {"speculation": SpeculationConfig(method, coupled=coupled, **SMALL, **speculation)}
        how["generation"] = GenerationConfig(24, ignore_eos=True, **placement)
        rows = [Request(it, 5 + b, params, how["generation"]) for b, it in enumerate(prompts)]
        alone = settings_of("autoregressive", 24, params, coupled=coupled, seed=5)
        found = texts_of(on_gpu.stream(rows, batch_size=2, **how))
        assert found == texts_of(on_cpu.generate(prompts, **alone))
        kept.add(id(on_gpu._pool._kept))
    assert len(kept) == 1


@pytest.mark.takes(seconds=30, gib=2)
def test_a_closed_run_frees_its_cache_when_the_engine_is_told_to(folder):
    engine = minitri.load(str(folder), dtype="bfloat16", device="cuda")
    sizes = []
    for _ in range(2):  # libraries take what they keep in the first one
        run = engine.generate([[5] * 400] * 64, max_new_tokens=50)
        next(run)
        assert run.stats.kv_cache_bytes > 4 << 20
        run.close()
        engine.release()
        torch._C._cuda_clearCublasWorkspaces()  # of which every capture drops what there is
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[1] <= sizes[0] + (1 << 20)
