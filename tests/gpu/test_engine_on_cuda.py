"""The engine on a CUDA device, in float32: the tokens of the CPU, wherever K and V are, and no
memory kept after a release."""

import functools

import pytest
import torch

import minitri
from minitri import End, GenerationConfig, Request, SamplingParams, SpeculationConfig
from minitri.caches.full import FullCache
from minitri.errors import InputError
from minitri.gpu.graphs import clear_workspaces
from minitri.gpu.offload.offloaded_cache import OffloadedFullCache
from minitri.model.cache import BlockKV
from tests.conftest import fill, tiny_config, write_hf_folder

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
def load(deep, folder):
    return functools.partial(minitri.load, str(deep), draft=str(folder), dtype="float32")


def tokens(engine, speculation, sampling=GREEDY, prompts=PROMPTS, **placement):
    generation = GenerationConfig(24, ignore_eos=True, **placement)
    how = {"generation": generation, "speculation": speculation, "sampling": sampling, "seed": 5}
    events = engine.generate(prompts, **how)
    return {event.row: event.token_ids for event in events if isinstance(event, End)}


@pytest.mark.parametrize(
    ("changes", "placement"),
    [
        ({"method": "autoregressive"}, {}),
        ({"method": "auto"}, {}),
        ({"method": "naive"}, {"cuda_graphs": False}),
        ({"method": "retrieval"}, {}),
        ({"method": "triforce"}, {}),
        ({"method": "triforce", "tree": "2x2"}, {}),
        ({"method": "naive"}, HOSTED),
        ({"method": "retrieval"}, {"offload": True, "on_chip": 0}),
        ({"method": "triforce"}, HOSTED),
        ({"method": "triforce", "tree": "4"}, {"offload": True, "on_chip": 0}),
    ],
)
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_every_method_gives_the_tokens_of_the_cpu(load, changes, placement, sampling):
    """Greedy and coupled; the retrieval cache is rebuilt every few tokens, of layers that visit
    the device. The next run, at another temperature, captures nothing and says what it would have
    said first."""
    coupled = sampling is WARM
    engine = load(device="cuda")
    speculation = SpeculationConfig(**changes, coupled=coupled, **SMALL)
    alone = SpeculationConfig("autoregressive", coupled=coupled)
    exact = tokens(load(device="cpu"), alone, sampling)
    assert tokens(engine, speculation, sampling, **placement) == exact
    kept = engine._pool._kept
    other = SamplingParams(0.5, top_p=0.8) if coupled else GREEDY
    again = tokens(engine, speculation, other, PROMPTS[::-1], **placement)
    assert engine._pool._kept is kept
    assert again == tokens(load(device="cpu"), alone, other, PROMPTS[::-1])


def test_a_stream_of_requests_gives_each_its_own_text(load):
    """Five through two places: rows that end make room for the next ones."""
    on_gpu, on_cpu = load(device="cuda"), load(device="cpu")
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


def test_more_than_the_device_holds_is_refused_in_one_line(folder):
    engine = minitri.load(str(folder), dtype="bfloat16", device="cuda")
    per_row = engine.config.kv_values_per_token * 2 * 512
    num_rows = int(2 * torch.cuda.get_device_properties(0).total_memory / per_row)
    with pytest.raises(InputError, match="use --offload") as caught:
        engine.generate([[5]] * min(num_rows, 10**6), generation=GenerationConfig(500))
    assert "\n" not in str(caught.value)


@torch.inference_mode()
def test_offload_holds_the_bits_of_the_full_cache():
    """Blocks of many sizes, kept in part, while copies of large layers are under way, after what
    another cache held."""
    config = tiny_config(num_layers=6, num_heads=8, num_kv_heads=8, head_dim=64)
    settings = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    whole, ours = FullCache.allocate(config, 2, 8192, **settings), None
    generator = torch.Generator("cuda").manual_seed(0)
    for slots in (whole.keys, whole.values):
        slots.normal_(generator=generator)
    whole.advance([1900, 3])
    ours = OffloadedFullCache(config, 2, 8192, on_chip=2, **settings)
    fill(ours, whole)
    for size in (3000, 1, 7, 2000, 4, 4, 1, 900):
        starts_B1 = torch.tensor(whole.lengths, device="cuda").unsqueeze(1)
        slots_BT = starts_B1 + torch.arange(size, device="cuda") if size < 10 else None
        for layer in range(6):
            k, v = (torch.randn(2, size, 8, 64, generator=generator, **settings) for _ in range(2))
            block = BlockKV(k, k, v, slots_BT)
            pairs = zip(ours.update(layer, block), whole.update(layer, block), strict=True)
            for got, exact in pairs:
                for b, length in enumerate(whole.lengths):
                    end = length + size
                    assert torch.equal(got[b, :, :end], exact[b, :, :end]), (size, layer)
        for cache in (whole, ours):
            cache.advance([size, size])
            cache.crop([length - size // 3 for length in cache.lengths])
    for b, length in enumerate(whole.lengths):
        pairs = [
            (ours.tokens(b, start, length), whole.tokens(b, start, length))
            for start in (1, length - 9)
        ]
        for got, exact in pairs:
            assert all(map(torch.equal, got, exact))
