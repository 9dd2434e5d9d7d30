"""A copy in 4 or 8 bits guesses with the retrieval cache: its kernel, here interpreted, equals the
plain formula. The network with compiled kernels between its matrices equals the plain one."""

import functools
import itertools
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import torch

from minitri.core.errors import InputError
from minitri.core.model.block import read_block
from minitri.core.model.execution import Execution
from minitri.core.model.llama import Layers, Llama
from minitri.core.roofline import GROUP, copy_bytes
from minitri.devices.choose import choose_device, choose_dtype, retrieval_copy
from minitri.devices.gpu import fused_modules, quantized_copies
from minitri.devices.gpu.fused_modules import FusedLayers, check_kernels, fuse_if_possible
from minitri.devices.gpu.quantized_copies import copy_in_few_bits, dequantize, quantize
from minitri.devices.replace import replace_modules
from tests.conftest import load, refused, tiny_model
from tests.core.rigs import Rig, new_cache, random_prompt, tiny_config
from tests.devices.cpu.test_kernels import random
from tests.devices.gpu_twins.conftest import DEVICE, ON_GPU
from tests.devices.gpu_twins.test_attention_backends import needs_triton

with suppress(ImportError):
    from minitri.devices.gpu.kernels import weights
CONFIG = tiny_config(num_layers=3)


def before_nan(tensor):
    """A copy of a tensor with NaN, or the largest numbers, right after it in memory."""
    bytes_ = torch.full((tensor.nbytes + 4096,), 127, dtype=torch.uint8, device=DEVICE)
    bytes_[: tensor.nbytes] = tensor.contiguous().view(torch.uint8).flatten().to(DEVICE)
    return bytes_[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32] + [torch.bfloat16] * ON_GPU)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_kernel_equals_the_formula(bits, dtype):
    """Rows, columns, groups and numbers that do not fill a tile; nothing after is read."""
    for M, N, E in ((1, 70, 1040), (5, 64, 512), (8, 1, 1), (9, 16, 130), (21, 33, 96)):
        matrix = [before_nan(part) for part in quantize(random(N, E, seed=1), bits)]
        x = before_nan(random(M, E).to(dtype))
        got = weights.multiply(x.view(M, 1, E), *matrix)
        assert (got.shape, got.dtype) == ((M, 1, N), dtype)
        exact = x.double() @ dequantize(*matrix)[:, :E].double().T
        rounding = 0.01 if ON_GPU and dtype != torch.float16 else 4 * torch.finfo(dtype).eps
        assert (got[:, 0].double() - exact).abs().max() <= rounding * exact.abs().max()


@needs_triton
@pytest.mark.parametrize(("bits", "least"), [(4, 14), (8, 7)])
def test_a_matrix_of_few_outputs_has_many_warps_too(bits, least, monkeypatch):
    """On each of the 132 multiprocessors of an H200, where o_proj of 7B makes 128 tiles."""
    monkeypatch.setattr(weights, "num_processors", lambda device: 132)
    monkeypatch.setattr(weights, "multiply_tile", kernel := MagicMock())
    for N in (4096, 12288):
        weights.multiply(random(3, GROUP), torch.empty(N, GROUP * bits // 8), torch.empty(1, N))
        rows, columns = kernel.__getitem__.call_args.args[0]
        sizes = kernel.__getitem__.return_value.call_args.kwargs
        assert rows * columns * min(sizes["SHARES"], sizes["num_warps"]) >= 132 * least


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_is_as_large_as_planned_and_shares_the_rest(tied, bits):
    """A rounded weight is half a step from the original, or a step next to the largest one."""
    config = tiny_config(tie_word_embeddings=tied, attention_bias=True)
    model = tiny_model(config)
    before = [weight.clone() for weight in model.parameters()]
    twin = copy_in_few_bits(model, bits)
    assert twin.num_bytes == copy_bytes(config, bits)
    ours = {id(weight) for weight in model.parameters()}
    own = [weight for weight in twin.parameters() if id(weight) not in ours]
    assert len(own) == 2 * (4 * config.num_layers + 1)
    assert torch.equal(twin.embed(torch.arange(9)), model.embed(torch.arange(9)))
    assert all(map(torch.equal, before, model.parameters()))
    layer, x = twin.layers[0].self_attn.qkv_proj, random(5, config.hidden_size)
    weight_NE = dequantize(layer.weight, layer.scales)[:, : config.hidden_size]
    torch.testing.assert_close(layer(x), x @ weight_NE.T + layer.bias)
    weight_NE = random(40, 300) * torch.logspace(-6, 3, 40).unsqueeze(1)
    weight_NE[7] = 0
    weight_NE = weight_NE.bfloat16().float()
    quants_NX, scales_GN = quantize(weight_NE, bits)
    assert len(quants_NX[0]) == 3 * GROUP * bits // 8
    steps_NE = scales_GN.T.abs().repeat_interleave(GROUP, 1)[:, :300]
    errors_NE = (dequantize(quants_NX, scales_GN)[:, :300] - weight_NE).abs()
    assert (errors_NE <= 1.001 * steps_NE).all()
    is_far_NE = weight_NE.abs() < ((1 << bits - 1) - 1.5) * steps_NE
    assert (errors_NE <= 0.501 * steps_NE)[is_far_NE].all()


@pytest.mark.parametrize(
    ("wanted", "device", "problem"),
    [("int8", "cpu", "GPU"), ("int4", "cpu", "kernels"), ("int4", "cuda", "RuntimeError")],
)
def test_weights_that_a_device_cannot_have_are_refused_in_one_line(
    wanted, device, problem, monkeypatch
):
    monkeypatch.setattr(quantized_copies, "check_kernel", Mock(side_effect=RuntimeError))
    execution = Execution(is_row_invariant=wanted == "int8")  # has compiled kernels
    model = SimpleNamespace(device=torch.device(device), execution=execution, config=CONFIG)
    with pytest.raises(InputError, match=f"draft_weights={wanted} .*{problem}"):
        retrieval_copy(model, wanted)
    assert retrieval_copy(model, "auto" if problem == "kernels" else "same") is None


@pytest.mark.parametrize("failure", [None, RuntimeError("no compiler")])
def test_a_copy_in_4_bits_guesses_by_default_where_it_takes_a_tenth_of_what_is_free(
    failure, monkeypatch, caplog
):
    """Without a kernel the target itself guesses, and a line says so."""
    monkeypatch.setattr(quantized_copies, "check_kernel", Mock(side_effect=failure))
    model = tiny_model(CONFIG)
    monkeypatch.setattr(Llama, "device", torch.device("cuda"))
    for num_free, has_copy in ((10, not failure), (9, False)):
        num_free *= copy_bytes(CONFIG, 4)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=num_free: (free, free))
        assert bool(retrieval_copy(model, "auto")) == has_copy
    assert len(caplog.records) == bool(failure)


def test_the_network_adds_and_norms_in_another_order_only(monkeypatch):
    """Hidden states, K and V to the bit, by the uncompiled functions; all weights are shared."""
    monkeypatch.setattr(fused_modules, "compiled", lambda function: function)
    plain, found = tiny_model(CONFIG), []
    ours = replace_modules(plain, {Layers: FusedLayers})
    assert {id(w) for w in ours.parameters()} == {id(w) for w in plain.parameters()}
    assert not isinstance(plain.layers, FusedLayers)
    for model in (plain, ours):
        rig = Rig(model, [random_prompt(CONFIG, 30)], method="autoregressive", num_new=4)
        found.append([rig.run(), rig.full.keys[..., :33, :], rig.full.values[..., :33, :]])
    (text, *slots), (other_text, *other_slots) = found
    assert text == other_text
    assert all(map(torch.equal, slots, other_slots))


@pytest.mark.slow
def test_a_boot_compiles_all_that_prompts_and_batches_need(monkeypatch):
    """For each of two models two kernels with a norm, by one row or more; RoPE and SiLU for both.
    PyTorch runs a function uncompiled that it has compiled 8 times."""
    made, models = [], []
    backend = lambda module, _: made.append(module) or module.forward  # noqa: E731
    compiled = functools.cache(functools.partial(torch.compile, dynamic=True, backend=backend))
    monkeypatch.setattr(fused_modules, "compiled", compiled)
    for changes in ({}, {"hidden_size": 96, "rms_norm_eps": 1e-5}):
        models.append(tiny_model(tiny_config(**changes)))
        check_kernels(models[-1])
    assert len(made) == 8
    with torch.inference_mode():
        for model, B, T in itertools.product(models, (1, 3), (30, 1, 4)):
            fused = replace_modules(model, {Layers: FusedLayers})
            read_block(fused, [[1] * T] * B, new_cache(model.config, B, 64))
    assert len(made) == 8


def test_a_wrong_kernel_fails_the_test_of_every_boot(monkeypatch):
    wrong = {fused_modules.rotate: lambda x_BTXD, cos, sin: fused_modules.rotate(x_BTXD, cos, -sin)}
    monkeypatch.setattr(fused_modules, "compiled", lambda function: wrong.get(function, function))
    with pytest.raises(AssertionError, match="not close"):
        check_kernels(tiny_model(CONFIG))


def test_where_kernels_do_not_work_the_model_stays_as_it_is_and_a_line_says_so(caplog, monkeypatch):
    monkeypatch.setattr(Llama, "device", torch.device("cuda"))
    monkeypatch.setattr(fused_modules, "check_kernels", Mock(side_effect=RuntimeError))
    model = tiny_model(CONFIG)
    assert fuse_if_possible(model) is model
    assert len(caplog.records) == 1


def test_a_gpu_is_taken_if_there_is_one_and_computes_in_bfloat16_if_it_can(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    ranks, devices = Mock(count=2), [choose_device(name) for name in ("auto", "cuda:1", "cpu:0")]
    devices += [choose_device(name, ranks) for name in ("auto", "cuda", "cpu")]
    assert [*map(str, devices)] == ["cuda", "cuda:1", "cpu", "cuda:1", "cuda:1", "cpu"]
    with pytest.raises(InputError, match="sees 2 GPUs"):
        choose_device("cuda:2")
    with pytest.raises(InputError, match="2 ranks"):
        choose_device("cuda:0", ranks)
    monkeypatch.setattr(torch.cuda, "set_device", Mock(side_effect=RuntimeError("out of memory")))
    with refused("cuda cannot be used", "out of memory"):
        load(folder, device="cuda")
    for capability, dtype in ((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, it=capability: it)
        assert choose_dtype("auto", devices[0]) == getattr(torch, dtype)
