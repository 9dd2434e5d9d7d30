"""The network on fused kernels equals the plain one: on a CPU run by Triton's interpreter, on a GPU
compiled. And how many launches a pass takes, counted on the meta device."""

from __future__ import annotations

import contextlib
import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from minitri.benchmarks.ledger import LAUNCHES
from minitri.caches.full import FullCache
from minitri.caches.streaming import StreamingCache
from minitri.config import ModelConfig
from minitri.drafters.layer_subset import with_layers
from minitri.gpu import sampling as gpu_sampling
from minitri.gpu.attention import GpuAttention, Math, TritonAttention
from minitri.gpu.backend_choice import tolerance
from minitri.gpu.captured_steps import CapturedSteps
from minitri.gpu.fused import (
    FusedAttention,
    FusedLayers,
    fuse,
    fuse_if_possible,
    largest_error,
)
from minitri.gpu.graphs import GraphPool
from minitri.gpu.kernels import are_usable
from minitri.model import block as block_module
from minitri.model.block import forward_block, make_block
from minitri.model.llama import Attention, Llama, Pass
from minitri.settings import SamplingParams, SpeculationConfig
from tests.cascades import Rig, near_copy, random_prompt
from tests.conftest import new_cache, tiny_config, tiny_model
from tests.gpu_twins.test_offloaded_cache import offloaded

triton = pytest.importorskip("triton", reason="needs triton, which is made for Linux")

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU  # the interpreter has none
META = torch.device("meta")
LIMIT = 8
"""Tokens of a short block here; the interpreter is slow."""
LLAMA_7B = ModelConfig(32, 4096, 11008, 32, 32, 128, 32000, 131072)


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
    assert largest_error(model) <= tolerance(dtype) / (100 if dtype == torch.float32 else 2)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv_BTX = torch.randn(2, 3, width, generator=generator).to(DEVICE, dtype)
    plain, ours = (mix_alone(kind, qkv_BTX, model) for kind in (Attention, FusedAttention))
    for wanted, got in zip(plain, ours, strict=True):
        assert torch.equal(wanted, got)  # to the bit, and nothing in other slots


def mix_alone(kind, qkv_BTX, model):
    """Queries, K, V and latest queries of a block, by a kind of attention."""
    (B, T, _), config = qkv_BTX.shape, model.config
    attention = copy.copy(model.layers[0].self_attn)
    attention.__class__ = kind
    slots_BT = torch.arange(B * T, device=DEVICE).view(B, T) + 7
    keys, values = qkv_BTX.new_zeros(2, 1, B, config.num_kv_heads, 64, config.head_dim)
    queries = qkv_BTX.new_zeros(1, B, T - 1, config.num_heads, config.head_dim)
    rotary, cache = model.rope.at(slots_BT * 100), FullCache(keys, values, [0] * B)
    shared = Pass(rotary, cache, None, slots_BT, None, queries, lambda q, *_: q)
    return [attention.mix(qkv_BTX, 0, shared), keys, values, queries]


@pytest.fixture
def slots_on_the_device(monkeypatch):
    monkeypatch.setattr(block_module, "reads_slots", lambda device, size: size <= LIMIT)


def twins(config, **changes):
    """A plain model and a fused one of the same weights."""
    models = [tiny_model(config, **changes) for _ in range(2)]
    for model in models:
        model.attend = GpuAttention(Math())
    return models[0], fuse(models[1])


@pytest.mark.parametrize("kind", ["full", "streaming"])
@pytest.mark.parametrize("num_queries", [2, 5])
def test_a_pass_leaves_what_a_plain_one_leaves(kind, num_queries, slots_on_the_device):
    """Ragged rows, a tree, the latest queries: hidden states, and every slot of a cache full of
    NaN."""
    config = tiny_config(num_layers=3)
    rule_TT = torch.eye(5, dtype=torch.bool) | torch.ones(5, 5, dtype=torch.bool).tril(-3)
    found = []
    for model in twins(config):
        if kind == "full":
            cache = new_cache(config, 2, 128)
        else:
            settings = SpeculationConfig(num_recent_tokens=60, gamma1=2, gamma2=2)
            cache = StreamingCache(
                config, model.rope, 2, settings, dtype=model.dtype, device=model.device
            )
        tensors = [slots for slots in vars(cache).values() if isinstance(slots, torch.Tensor)]
        for slots in tensors:
            slots.fill_(torch.nan)
            slots[:, :, :, :40] = torch.randn(1, generator=torch.Generator().manual_seed(2))
        cache.advance([40, 7])
        queries = torch.full((3, 2, num_queries, 4, 8), torch.nan)
        inputs = make_block(
            model, [[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]], cache, 5, torch.tensor([0, 1, 1, 2, 3])
        )
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
    prompts = [random_prompt(config, n, seed=n) for n in (30, 3)]
    gammas = {} if method == "autoregressive" else {"gamma1": 2, "gamma2": 3}
    texts = []
    for target in twins(config):
        draft = near_copy(target, 0.02)
        draft = fuse(draft) if isinstance(target.layers, FusedLayers) else draft
        texts.append(
            Rig(
                target, prompts, draft=draft, num_new=5, method=method, budget=24,
                num_recent_tokens=60, graphs=GraphPool(torch.device("cpu")), **gammas,
            ).run()
        )  # fmt: skip
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


def test_a_block_without_room_is_refused_and_nothing_is_written_behind_a_cache(slots_on_the_device):
    config = tiny_config()
    _, ours = twins(config)
    memory = torch.zeros(2, 2, 1, 2, 128, 8)
    cache = FullCache(memory[0, :, :, :, :64], memory[1, :, :, :, :64], [60])
    inputs = make_block(ours, [[1, 2, 3, 4, 5, 6]], cache, 6)
    with pytest.raises(IndexError, match="a block of 6 behind 60 of 64 tokens"):
        forward_block(ours, inputs, cache, None)
    cache.crop([10])  # as where a captured step keeps the lengths of its capture
    with contextlib.suppress(RuntimeError):  # the plain attention has no such slots, either
        forward_block(ours, inputs, cache, None)
    assert memory[:, 0, :, :, 60:64].abs().amax((-1, -3)).all()
    assert not memory[..., 64:, :].any()


def test_some_layers_of_a_fused_model_are_fused():
    plain, ours = twins(tiny_config(num_layers=3))
    assert type(with_layers(plain, [0, 2]).layers) is type(plain.layers)
    view = with_layers(ours, [0, 2])
    assert isinstance(view.layers, FusedLayers)
    assert view.layers[1] is ours.layers[2]


@pytest.mark.parametrize("problem", ["no compiler", "wrong numbers"])
def test_kernels_that_do_not_work_are_not_used_and_it_says_why(problem, caplog, monkeypatch):
    def error() -> float:
        if problem == "no compiler":
            raise RuntimeError("gcc not found")
        return 0.5

    monkeypatch.delenv("MINITRI_KERNELS", raising=False)
    assert not are_usable("fused kernels", error, 0.1)
    [record] = caplog.records
    reason = "gcc not found" if problem == "no compiler" else "off by 0.5"
    assert record.levelno == logging.WARNING
    assert f"fused kernels are not used ({reason})" in record.getMessage()
    assert are_usable("fused kernels", lambda: 0.05, 0.1)
    assert not are_usable("fused kernels", lambda: float("nan"), 0.1)
    monkeypatch.setenv("MINITRI_KERNELS", "off")
    assert not are_usable("fused kernels", lambda: 0.05, 0.1)


def test_a_model_on_another_device_stays_as_it_is():
    model = tiny_model(tiny_config())
    fuse_if_possible(model)
    assert not isinstance(model.layers, FusedLayers)


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch: operations that compute, and Triton's kernels, which do not
    run."""

    def __init__(self, monkeypatch) -> None:
        super().__init__()
        self.names: list[str] = []

        def launch(kernel, grid):
            return lambda *args, **settings: self.names.append(kernel.__name__)

        monkeypatch.setattr(triton.runtime.jit.KernelInterface, "__getitem__", launch)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returns = [it.alias_info for it in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        is_free = is_view or func._schema.name.startswith(
            ("aten::empty", "aten::new_empty", "aten::_unsafe_view")
        )
        if not is_free:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def launches_of_a_pass(config, monkeypatch, *, is_fused: bool) -> int:
    """A captured step of 7 tokens, from their ids to distributions."""
    monkeypatch.setattr(gpu_sampling, "has_kernel", lambda device: True)
    monkeypatch.setattr(F, "rms_norm", lambda x, *_: x.clone())  # one kernel, as on a GPU
    model = Llama(config, dtype=torch.bfloat16, device=META)
    model.attend = GpuAttention(TritonAttention(num_processors=132))
    if is_fused:
        fuse(model)
    cache = FullCache.allocate(config, 1, 122_880, dtype=model.dtype, device=META)
    cache.advance([122_000])
    queries = torch.empty(config.num_layers, 1, 7, config.num_heads, config.head_dim, device=META)
    filters = SamplingParams(0.6, top_p=0.9)
    with Launches(monkeypatch):
        steps = CapturedSteps(
            model, cache, filters, GraphPool(META), {7}, vocab_size=config.vocab_size,
            queries_LBTHD=queries.to(model.dtype),
        )  # fmt: skip
        inputs = make_block(model, [[0] * 7], cache, 7)
    with Launches(monkeypatch) as launches:
        assert steps.by_size[7](inputs).shape == (1, 7, config.vocab_size)
    return len(launches.names)


def test_a_pass_of_7b_takes_at_most_350_launches(slots_on_the_device, monkeypatch):
    """10 per layer. Without the kernels it is twice as many."""
    plain, ours = (
        launches_of_a_pass(LLAMA_7B, monkeypatch, is_fused=is_fused) for is_fused in (False, True)
    )
    less = tiny_config(num_layers=31, hidden_size=4096, num_heads=32, num_kv_heads=32, head_dim=128)
    print(f"\nlaunches of a pass of 7 tokens, 7B: {plain} plain, {ours} fused")
    assert ours <= 350
    assert ours - launches_of_a_pass(less, monkeypatch, is_fused=True) <= 10
    assert (plain, ours) == tuple(a + 32 * b for a, b in LAUNCHES.values())
