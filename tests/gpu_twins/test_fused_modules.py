"""The network on fused kernels equals the plain one: on a CPU run by Triton's interpreter, on a GPU
compiled."""

import contextlib

import pytest
import torch

from minitri.caches.full import FullCache
from minitri.caches.streaming import StreamingCache
from minitri.gpu import fused_modules
from minitri.gpu.attention_backends import TOLERANCES
from minitri.gpu.fused_modules import (
    FusedAttention,
    FusedLayers,
    fuse,
    fuse_if_possible,
    largest_error,
)
from minitri.gpu.graphs import GraphPool
from minitri.gpu.kernels import problem_with
from minitri.model import block as block_module
from minitri.model.block import forward_block, make_block
from minitri.model.llama import Llama, Pass
from minitri.settings import SpeculationConfig
from tests.cascades import Rig, near_copy, random_prompt
from tests.conftest import CPU, new_cache, tiny_config, tiny_model
from tests.gpu_twins.conftest import as_on_a_gpu
from tests.gpu_twins.test_offloaded_cache import offloaded

pytest.importorskip("triton", reason="needs triton, which is made for Linux")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU  # the interpreter has none
LIMIT = 8
"""Tokens of a short block here; the interpreter is slow."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "hidden_size": 576},
        {"num_heads": 6, "num_kv_heads": 1, "head_dim": 24, "intermediate_size": 1100},
    ],
)
def test_the_kernels_equal_the_plain_operations(shape, dtype):
    """MHA and GQA; heads, rows and gates that fill no tile."""
    config = tiny_config(**shape)
    generator = torch.Generator().manual_seed(1)
    model = Llama(config, dtype=dtype, device=DEVICE)
    model.norm.weight.copy_(torch.randn(config.hidden_size, generator=generator))
    assert largest_error(model) <= TOLERANCES[dtype] / (100 if dtype == torch.float32 else 2)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv_BTX = torch.randn(2, 3, width, generator=generator).to(DEVICE, dtype)
    attention = model.layers[0].self_attn
    plain, ours = (mix(it, qkv_BTX, model) for it in (attention, FusedAttention(attention)))
    for wanted, got in zip(plain, ours, strict=True):
        assert torch.equal(wanted, got)  # to the bit, and nothing in other slots


def mix(attention, qkv_BTX, model):
    """Queries, K, V and latest queries of a block."""
    (B, T, _), config = qkv_BTX.shape, model.config
    slots_BT = torch.arange(B * T, device=DEVICE).view(B, T) + 7
    keys, values = qkv_BTX.new_zeros(2, 1, B, config.num_kv_heads, 64, config.head_dim)
    queries = qkv_BTX.new_zeros(1, B, T - 1, config.num_heads, config.head_dim)
    rotary, cache = model.rope.at(slots_BT * 100), FullCache(keys, values, [0] * B)
    shared = Pass(rotary, cache, None, slots_BT, None, queries, lambda q, *_: q)
    return [attention.mix(qkv_BTX, 0, shared), keys, values, queries]


@pytest.fixture
def slots_on_the_device(monkeypatch):
    monkeypatch.setattr(block_module, "reads_slots", lambda device, size: size <= LIMIT)


def twins(config):
    """A plain model and a fused one of the same weights."""
    model = as_on_a_gpu(tiny_model(config))
    return model, fuse(model)


@pytest.mark.parametrize("kind", ["full", "streaming"])
@pytest.mark.parametrize("num_queries", [2, 5])
def test_a_pass_leaves_what_a_plain_one_leaves(kind, num_queries, slots_on_the_device):
    """Ragged rows, a tree, the latest queries: hidden states, and every slot of a cache full of
    NaN."""
    config = tiny_config(num_layers=3)
    rule_TT = torch.eye(5, dtype=torch.bool) | torch.ones(5, 5, dtype=torch.bool).tril(-3)
    settings = SpeculationConfig(num_recent_tokens=60, gamma1=2, gamma2=2)
    found = []
    for model in twins(config):
        options = {"dtype": model.dtype, "device": model.device}
        cache = new_cache(config, 2, 128)
        if kind == "streaming":
            cache = StreamingCache(config, model.rope, 2, settings, **options)
        tensors = [slots for slots in vars(cache).values() if isinstance(slots, torch.Tensor)]
        for slots in tensors:
            slots.fill_(torch.nan)
            slots[:, :, :, :40] = torch.randn(1, generator=torch.Generator().manual_seed(2))
        cache.advance([40, 7])
        queries = torch.full((3, 2, num_queries, 4, 8), torch.nan)
        rows = [[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]]
        inputs = make_block(model, rows, cache, 5, torch.tensor([0, 1, 1, 2, 3]))
        hidden = forward_block(model, inputs, cache, queries, rule_TT)
        found.append([hidden, queries, *tensors])
    assert len(found[0]) == (4 if kind == "full" else 5)
    for wanted, got in zip(*found, strict=True):
        assert torch.equal(wanted.isnan(), got.isnan())
        assert (wanted - got).nan_to_num(0).abs().max() < 2e-5


@pytest.mark.parametrize("method", ["autoregressive", "triforce"])
def test_texts_stay_the_same(method, slots_on_the_device):
    """Full, retrieval and streaming caches, rows of different lengths, captured steps."""
    config = tiny_config()
    settings = {"num_new": 5, "method": method, "budget": 24, "num_recent_tokens": 60}
    if method == "triforce":
        settings |= {"gamma1": 2, "gamma2": 3}
    texts = []
    for target in twins(config):
        draft = near_copy(target, 0.02)
        draft = fuse(draft) if isinstance(target.layers, FusedLayers) else draft
        prompts = [random_prompt(config, n, seed=n) for n in (30, 3)]
        texts.append(Rig(target, prompts, draft=draft, graphs=GraphPool(CPU), **settings).run())
    assert texts[0] == texts[1]


def test_kv_in_host_memory_and_long_blocks_are_written_as_they_were(slots_on_the_device):
    config = tiny_config(context_length=512)
    plain, ours = twins(config)
    long, short = random_prompt(config, LIMIT + 3), random_prompt(config, 3, seed=3)
    hosted = offloaded(1, batch_size=1, capacity=256, config=config)
    for cache in (hosted, new_cache(config, 1, 256)):
        expected = new_cache(config, 1, 256)
        for tokens in (long, short):
            got = forward_block(ours, make_block(ours, [tokens], cache, len(tokens)), cache, None)
            inputs = make_block(plain, [tokens], expected, len(tokens))
            assert (got - forward_block(plain, inputs, expected, None)).abs().max() < 2e-5
            for each in (cache, expected):
                each.advance([len(tokens)])


def test_a_block_without_room_is_refused_and_nothing_is_written_after_a_cache(slots_on_the_device):
    config = tiny_config()
    _, ours = twins(config)
    memory = torch.zeros(2, 2, 1, 2, 128, 8)
    cache = FullCache(memory[0, :, :, :, :64], memory[1, :, :, :, :64], [60])
    inputs = make_block(ours, [[1, 2, 3, 4, 5, 6]], cache, 6)
    with pytest.raises(IndexError):
        forward_block(ours, inputs, cache, None)
    cache.crop([10])  # as where a captured step keeps the lengths of its capture
    with contextlib.suppress(RuntimeError):  # the plain attention has no such slots, either
        forward_block(ours, inputs, cache, None)
    assert memory[:, 0, :, :, 60:64].abs().amax((-1, -3)).all()
    assert not memory[..., 64:, :].any()


def test_a_fused_model_shares_all_weights_and_leaves_the_plain_one():
    plain, ours = twins(tiny_config())
    assert {id(w) for w in ours.parameters()} == {id(w) for w in plain.parameters()}
    assert not isinstance(plain.layers, FusedLayers)
    assert isinstance(ours.layers, FusedLayers)


@pytest.mark.parametrize(
    ("error", "problem"), [(0.05, ""), (0.5, "off by 0.5"), (torch.nan, "nan")]
)
def test_kernels_are_used_where_they_agree_with_their_oracle(error, problem):
    assert problem in problem_with(lambda: error, 0.1)
    assert bool(problem) == bool(problem_with(lambda: error, 0.1))


@pytest.mark.parametrize(
    ("device", "problem", "kernels", "is_fused"),
    [
        ("cuda", None, "", True),
        ("cuda", "gcc not found", "", False),
        ("cuda", None, "off", False),
        ("cpu", None, "", False),
    ],
)
def test_where_kernels_do_not_work_the_model_stays_as_it_is_and_it_says_why(
    device, problem, kernels, is_fused, caplog, monkeypatch
):
    def error(model):
        if problem:
            raise RuntimeError(problem)
        return 0.0

    model = tiny_model(tiny_config())
    monkeypatch.setenv("MINITRI_KERNELS", kernels)
    monkeypatch.setattr(fused_modules, "largest_error", error)
    monkeypatch.setattr(Llama, "device", torch.device(device))
    found = fuse_if_possible(model)
    assert isinstance(found.layers, FusedLayers) == is_fused
    assert is_fused or found is model
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(problem)
    assert (problem or "") in caplog.text
