"""Captured steps on a CUDA device: bits of eager ones, nothing allocated, one wait a verdict."""

from importlib.util import find_spec

import pytest
import torch
from torch.utils._pytree import tree_map

from minitri.core.caches.full import FullCache
from minitri.core.decoding.random_source import IndependentSource
from minitri.core.decoding.verification import Guesses
from minitri.core.graphs import GraphPool
from minitri.core.model.block import pack_block
from minitri.core.model.llama import Llama
from minitri.core.runner import ModelRunner, Passes
from minitri.core.settings import BACKENDS, SamplingParams
from minitri.devices.gpu.attention_backends import choose_attention
from minitri.devices.gpu.fused_modules import fuse_if_possible
from tests.core.rigs import Rig, random_prompt, tiny_config
from tests.gpu.conftest import waits

WARM = SamplingParams(0.6, top_p=0.9)
CONFIG = tiny_config(
    num_layers=3, hidden_size=512, num_heads=8, num_kv_heads=4, head_dim=64, context_length=4096
)


def gpu_model(backend: str = "auto") -> Llama:
    """A random model with a backend, which has to work, but for flash without its package."""
    if backend == "flash" and find_spec("flash_attn") is None:
        pytest.skip("needs the flash_attn package")
    how = {"dtype": torch.bfloat16, "device": torch.device("cuda")}
    attend = choose_attention(how["device"], how["dtype"], CONFIG, wanted=backend)
    model = Llama(CONFIG, attend=attend, **how).eval()
    generator = torch.Generator("cuda").manual_seed(0)
    for name, weight in model.named_parameters():
        weight.normal_(0, 0.05, generator=generator)
        if name.endswith("norm.weight"):
            weight.fill_(1)
    return fuse_if_possible(model)


@pytest.mark.takes(seconds=15, gib=2)
@pytest.mark.parametrize("name", BACKENDS)
@torch.inference_mode()
def test_a_replay_has_the_bits_of_an_eager_pass(name):
    """Lengths and temperatures change, to 0 too; nothing is allocated, and nobody waits."""
    model = gpu_model(name)
    cache = FullCache.allocate(model, 2, 1024)
    pool = GraphPool(model.device)
    passes = Passes(model, cache, WARM, CONFIG.vocab_size)
    runner = ModelRunner(passes, graphs=pool, block_sizes={1, 4})
    rule = IndependentSource().rule
    for size, kept, cropped in ((4, 4, 0), (1, 1, 0), (4, 2, 0), (4, 4, 3), (1, 1, 0), (4, 3, 2)):
        blocks = [
            [(row * 31 + size * 7 + i) % CONFIG.vocab_size for i in range(size)] for row in range(2)
        ]
        warm = SamplingParams(0.3 + 0.1 * cache.lengths[0], top_p=0.7 + 0.02 * cache.lengths[0])
        runner.set_sampling(0, SamplingParams() if kept == 2 else warm)
        packed_4BT = pack_block(model, [row[:1] for row in blocks], cache, size)
        tokens = torch.tensor(blocks)[:, 1:]  # on the host
        q = torch.rand(2, size - 1, CONFIG.vocab_size, device="cuda").softmax(2)
        guesses = Guesses(tokens, q, torch.tensor([size - 1, 0]))
        inputs = (packed_4BT, torch.rand(2, size, dtype=torch.float64), guesses)
        moved = tree_map(lambda it: it.cuda(), inputs)
        hidden = passes.forward(moved[0], moved[2].tokens_BN)
        logits, probs, verdict = passes.verify(*moved, rule=rule)
        slots = [it[:, :, :, : cache.lengths[0] + size] for it in (cache.keys, cache.values)]
        exact = [it.clone() for it in slots]
        got = [torch.empty_like(it) for it in (hidden, probs)]
        for _ in range(2):  # the first time, a size is captured
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            with waits() as found:
                got[0].copy_(pool.run(passes.forward, packed_4BT, tokens))
                got[1].copy_(pool.run(passes.probs, logits))  # all overwrite what others return
                verified = pool.run(passes.verify, *inputs, rule=rule)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert not found
        wanted = (hidden, probs, logits, probs, verdict)
        assert all(map(torch.equal, (*got, *verified, *slots), (*wanted, *exact)))
        cache.advance([kept, kept])
        cache.crop([length - cropped for length in cache.lengths])


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
    assert all(stage.seconds > 0 for stage in rig.stats.stages)
