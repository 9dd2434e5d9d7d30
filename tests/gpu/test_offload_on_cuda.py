"""KV in host memory on a real device: the bits of the full cache, through engines of their own."""

import pytest
import torch

import minitri
from minitri import End, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.caches.full import FullCache
from minitri.errors import InputError
from minitri.gpu.offload.offloaded_cache import OffloadedFullCache
from minitri.model.cache import BlockKV
from tests.conftest import fill, tiny_config, write_hf_folder

PROMPTS = [[5, 6, 7], list(range(10, 200)), [9]]


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory):
    """Five layers, so that staging buffers change their layer in every pass."""
    return write_hf_folder(tmp_path_factory.mktemp("models") / "deep", num_hidden_layers=5)


def tokens(engine, speculation, sampling, **placement):
    generation = GenerationConfig(max_new_tokens=24, ignore_eos=True, **placement)
    events = engine.generate(
        PROMPTS, generation=generation, speculation=speculation, sampling=sampling, seed=5
    )
    return {event.row: event.token_ids for event in events if isinstance(event, End)}


@pytest.mark.parametrize("on_chip", [0, 2])
@pytest.mark.parametrize("method", ["autoregressive", "naive", "retrieval", "triforce"])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_offload_gives_the_tokens_of_the_full_cache(
    folder, deep_folder, method, on_chip, cuda_graphs
):
    """The retrieval cache is chosen anew every few tokens, of layers that visit the device."""
    engine = minitri.load(str(deep_folder), draft=str(folder), dtype="float32", device="cuda")
    speculation = SpeculationConfig(
        method, gamma1=2, gamma2=3, budget=32, num_recent_tokens=12, rebuild_stride=4, coupled=True
    )
    sampling = SamplingParams(0.8, top_p=0.9)
    whole = tokens(engine, speculation, sampling)
    assert (
        tokens(
            engine, speculation, sampling, offload=True, on_chip=on_chip, cuda_graphs=cuda_graphs
        )
        == whole
    )


@torch.inference_mode()
def test_offload_holds_the_bits_of_the_full_cache():
    """Blocks of many sizes, kept in part, while copies of large layers are under way."""
    config = tiny_config(num_layers=6, num_heads=8, num_kv_heads=8, head_dim=64)
    settings = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    whole = FullCache.allocate(config, 2, 8192, **settings)
    ours = OffloadedFullCache.placed(config, 2, 8192, on_chip=2, **settings)
    generator = torch.Generator("cuda").manual_seed(0)
    for size in (3000, 1, 7, 2000, 4, 4, 1, 900):
        for layer in range(6):
            k, v = (torch.randn(2, size, 8, 64, generator=generator, **settings) for _ in range(2))
            starts_B1 = torch.tensor(whole.lengths, device="cuda").unsqueeze(1)
            slots_BT = starts_B1 + torch.arange(size, device="cuda") if size < 10 else None
            got, exact = (
                cache.update(layer, BlockKV(k, k, v, slots_BT)) for cache in (ours, whole)
            )
            for a, z in zip(got, exact, strict=True):
                for b, length in enumerate(whole.lengths):
                    assert torch.equal(a[b, :, : length + size], z[b, :, : length + size]), (
                        size,
                        layer,
                    )
        for cache in (whole, ours):
            cache.advance([size, size])
            cache.crop([length - size // 3 for length in cache.lengths])


@torch.inference_mode()
def test_what_the_device_holds_is_copied_to_the_bit():
    config = tiny_config(num_layers=5, num_heads=8, num_kv_heads=8, head_dim=64)
    settings = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    whole = FullCache.allocate(config, 2, 2000, **settings)
    generator = torch.Generator("cuda").manual_seed(0)
    for slots in (whole.keys, whole.values):
        slots.normal_(generator=generator)
    whole.advance([1900, 3])
    ours = OffloadedFullCache.placed(config, 2, 2000, on_chip=2, **settings)
    fill(ours, whole)
    for b, length in enumerate(whole.lengths):
        for got, exact in zip(ours.layers(b), whole.layers(b), strict=True):
            assert all(
                torch.equal(a[:, :length], z[:, :length]) for a, z in zip(got, exact, strict=True)
            )
        for got, exact in zip(ours.tokens(b, 1, length), whole.tokens(b, 1, length), strict=True):
            assert torch.equal(got, exact)


def test_two_engines_in_one_process_do_not_disturb_each_other(folder):
    engines = [minitri.load(str(folder), dtype="float32", device="cuda") for _ in range(2)]
    settings = SpeculationConfig("retrieval", gamma2=3, budget=32), SamplingParams()
    alone = tokens(engines[0], *settings)
    runs = [engine.generate([9] * 40, speculation=settings[0]) for engine in engines]
    for _ in range(20):
        for run in runs:
            next(run, None)
    assert tokens(engines[1], *settings) == alone


def test_more_than_the_device_holds_is_refused_in_one_line(folder):
    engine = minitri.load(str(folder), dtype="bfloat16", device="cuda")
    per_row = engine.config.kv_values_per_token * 2 * 512
    num_rows = int(2 * torch.cuda.get_device_properties(0).total_memory / per_row)
    with pytest.raises(InputError, match="use --offload") as caught:
        engine.generate([[5]] * min(num_rows, 10**6), generation=GenerationConfig(500))
    assert "\n" not in str(caught.value)
