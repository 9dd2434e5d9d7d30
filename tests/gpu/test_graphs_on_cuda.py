"""Captured steps on a CUDA device: the bits of eager ones, no allocation, one wait for every
verdict; and every attention backend."""

from importlib.util import find_spec

import pytest
import torch

from minitri.core.caches.full import FullCache
from minitri.core.decoding.random_source import IndependentSource
from minitri.core.decoding.sampling import probs_from_logits
from minitri.core.decoding.verification import Proposal
from minitri.core.graphs import GraphPool
from minitri.core.model.attention import attend_math
from minitri.core.model.block import pack_block
from minitri.core.model.llama import Llama
from minitri.core.offload.streams import clock_of
from minitri.core.runner import ModelRunner, Passes
from minitri.core.settings import BACKENDS, SamplingParams
from minitri.devices.gpu.attention_backends import TOLERANCES, choose_attention
from minitri.devices.gpu.fused_modules import fuse_if_possible
from tests.core.rigs import Rig, random_prompt, tiny_config
from tests.devices.test_attention import random_case
from tests.gpu.conftest import waits

WARM = SamplingParams(0.6, top_p=0.9)
CONFIG = tiny_config(
    num_layers=3, hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=64, context_length=4096
)


def attention(name: str = "auto", dtype: torch.dtype = torch.bfloat16):
    """A backend, which has to work, but for flash where there is no such package."""
    device = torch.device("cuda")
    if name == "flash" and find_spec("flash_attn") is None:
        pytest.skip("needs the flash_attn package")
    return choose_attention(device, dtype, CONFIG, wanted=name)


@pytest.mark.takes(seconds=30, gib=2)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_backend_agrees_with_the_oracle(name, dtype):
    """By lengths on the device, and, as for a prompt, on the host; a few shapes, as each is
    compiled."""
    attend = attention(name, dtype)
    for T, H, K in ((1, 8, 8), (3, 9, 3), (16, 8, 2)):
        case = random_case(T, (0, 1, 700, 2047), H, K, D=64, S=2304, seed=T, dtype=dtype)
        *tensors, lengths = case
        exact = attend_math(*(tensor.double() for tensor in tensors), lengths)
        for lengths_B in (torch.tensor(lengths).cuda(), None):
            got = attend(*(tensor.cuda() for tensor in tensors), lengths, None, lengths_B)
            assert (got.double().cpu() - exact).abs().max() < 2 * TOLERANCES[dtype], T


def gpu_model(backend: str = "auto") -> Llama:
    how = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    model = Llama(CONFIG, attend=attention(backend), **how).eval()
    generator = torch.Generator("cuda").manual_seed(0)
    for name, weight in model.named_parameters():
        weight.normal_(0, 0.05, generator=generator)
        if name.endswith("norm.weight"):
            weight.fill_(1)
    return fuse_if_possible(model)


def model_cache_and_pool(backend: str = "auto"):
    """Of two rows."""
    model = gpu_model(backend)
    cache = FullCache.allocate(CONFIG, 2, 1024, dtype=model.dtype, device=model.device)
    return model, cache, GraphPool(model.device)


def inputs_of(model, cache, blocks):
    """Of a pass that is certain of the first token of each row only; on the host."""
    packed_4BT = pack_block(model, [row[:1] for row in blocks], cache, len(blocks[0]))
    return packed_4BT, torch.tensor(blocks)[:, 1:]


@pytest.mark.takes(seconds=15, gib=2)
@pytest.mark.parametrize("name", BACKENDS)
@torch.inference_mode()
def test_a_replay_has_the_bits_of_an_eager_pass(name):
    """The same block after a prefix that grows and shrinks, at changing temperatures, 0 too:
    probabilities, K, V. It allocates nothing, and waits for nothing."""
    model, cache, pool = model_cache_and_pool(name)
    settings = {"vocab_size": CONFIG.vocab_size, "graphs": pool, "block_sizes": {1, 4}}
    runner = ModelRunner(model, cache, WARM, **settings)
    for size, kept, cropped in ((4, 4, 0), (1, 1, 0), (4, 2, 0), (4, 4, 3), (1, 1, 0), (4, 3, 2)):
        blocks = [
            [(row * 31 + size * 7 + i) % CONFIG.vocab_size for i in range(size)] for row in range(2)
        ]
        warm = SamplingParams(0.3 + 0.1 * cache.lengths[0], top_p=0.7 + 0.02 * cache.lengths[0])
        runner.sample_by(0, SamplingParams() if kept == 2 else warm)
        inputs = inputs_of(model, cache, blocks)
        eager = runner.passes.forward(*(it.cuda() for it in inputs))
        logits = runner.passes.head(eager)
        probs = runner.passes.probs(logits)
        slots = [it[:, :, :, : cache.lengths[0] + size] for it in (cache.keys, cache.values)]
        exact = [it.clone() for it in slots]
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with waits() as found:
            replayed = pool.run(runner.passes.forward, *inputs)
            replayed_probs = pool.run(runner.passes.probs, logits)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert not found
        assert torch.equal(replayed, eager)
        assert torch.equal(replayed_probs, probs)
        assert all(map(torch.equal, slots, exact))
        cache.advance([kept, kept])
        cache.crop([length - cropped for length in cache.lengths])
    assert pool.num_graphs == 4


@pytest.mark.takes(seconds=5, gib=1)
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.6, top_k=50, top_p=0.9, min_p=0.01)]
)
@torch.inference_mode()
def test_distributions_and_a_verdict_wait_for_the_device_once(sampling):
    generator = torch.Generator("cuda").manual_seed(0)
    logits_BNV = torch.randn(2, 4, 32000, generator=generator, device="cuda") * 3
    tokens = [[5, 6, 7], [8]]
    source = IndependentSource()
    source.restart(0, 0)
    source.restart(1, 1)
    with waits() as found:
        probs_BNV = probs_from_logits(logits_BNV.flatten(0, 1), sampling).unflatten(0, (2, 4))
        origins = [["draft"] * len(row) for row in tokens]
        proposal = Proposal.of(tokens, probs_BNV[:, :3], origins)
        source.verify(proposal, probs_BNV, [5, 5], [True, True])
    assert len(found) == 1


@pytest.mark.takes(seconds=10, gib=2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@torch.inference_mode()
def test_a_draft_round_in_a_graph_has_the_bits_of_an_eager_one(dtype):
    """By uniform numbers, and by keys of noise."""
    model, cache, pool = model_cache_and_pool()
    cache.advance([700, 30])
    passes = Passes(model, cache, WARM, CONFIG.vocab_size, None)
    packed_4BT, _ = inputs_of(model, cache, [[5, 6], [7, 8]])
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        size = 1 if dtype.is_floating_point else 2**40
        numbers_BN = size * torch.rand(2, 4, dtype=torch.float64, generator=generator)
        inputs = packed_4BT, numbers_BN.to(dtype)
        eager = passes.round(*(it.cuda() for it in inputs))
        for ours, theirs in zip(pool.run(passes.round, *inputs), eager, strict=True):
            assert torch.equal(ours, theirs)
    assert pool.num_graphs == 1


@pytest.mark.takes(seconds=10, gib=2)
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("method", ["autoregressive", "naive", "retrieval", "triforce"])
def test_a_step_waits_once_for_every_verdict(method, coupled):
    target, draft = gpu_model(), gpu_model()
    settings = {"sampling": WARM, "budget": 64, "num_recent_tokens": 200}
    settings |= {"gamma1": 2, "gamma2": 4, "rebuild_stride": 1000, "num_new": 200}
    settings |= {"method": method, "coupled": coupled, "prefill_chunk": 512}
    rig = Rig(target, [random_prompt(CONFIG, 600)], draft=draft, **settings)
    with torch.inference_mode():
        rig.start()
        rig.session.step()  # in which the drafter reads its window
        before = rig.num_verdicts()
        with waits() as found:
            for _ in range(3):
                rig.session.step()
    assert len(found) == rig.num_verdicts() - before


@pytest.mark.takes(seconds=5, gib=2)
def test_the_clock_tells_what_the_device_took():
    """Not what the host took to launch it; known without waiting, once the device is done."""
    clock, seconds = clock_of(torch.device("cuda")), []
    a = torch.randn(8192, 8192, device="cuda")
    a @ a  # in which libraries are loaded
    for num in (2, 20):
        started = clock.now()
        for _ in range(num):
            a @ a
        clock.since(started, seconds.append)
    assert not seconds
    torch.cuda.synchronize()
    clock.settle()
    assert seconds[1] > 3 * seconds[0] > 0
