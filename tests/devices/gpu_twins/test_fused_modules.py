"""The network with compiled kernels between its matrices equals the plain one: on a CPU they are
compiled to C++, on a GPU to Triton."""

import shutil

import pytest
import torch

from minitri.core.model.llama import Layers, Llama
from minitri.devices.gpu import fused_modules
from minitri.devices.gpu.fused_modules import FusedLayers, check_kernels, compiled, fuse_if_possible
from minitri.devices.replace import replace_modules
from tests.conftest import tiny_model
from tests.core.rigs import Rig, random_prompt, tiny_config
from tests.devices.gpu_twins.conftest import DEVICE, ON_GPU

CONFIG = tiny_config(num_layers=3)
needs_compiler = pytest.mark.skipif(
    not ON_GPU and shutil.which("g++") is None, reason="needs a C++ compiler"
)


def fused(model: Llama) -> Llama:
    return replace_modules(model, {Layers: FusedLayers})


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernels_pass_the_test_of_every_boot(dtype):
    """Whatever the size of a batch and of a block; and a model need not compile them again."""
    model = Llama(CONFIG, dtype=dtype, device=DEVICE)
    check_kernels(model)
    with torch.inference_mode():
        for B, T in ((2, 1), (2, 5), (1, 9)):
            x_BTE = torch.randn(B, T, 2 * CONFIG.hidden_size, device=DEVICE, dtype=dtype)
            got, exact = (
                gate(x_BTE) for gate in (compiled(fused_modules.gate), fused_modules.gate)
            )
            torch.testing.assert_close(got, exact, rtol=0.01, atol=0.01)
        num_compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        check_kernels(Llama(tiny_config(hidden_size=48), dtype=dtype, device=DEVICE))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_compiled


def test_the_network_adds_and_norms_in_another_order_only(monkeypatch):
    """Hidden states, K and V to the bit, by the uncompiled functions; all weights are shared."""
    monkeypatch.setattr(fused_modules, "compiled", lambda function: function)
    plain, found = tiny_model(CONFIG), []
    ours = fused(plain)
    assert {id(w) for w in ours.parameters()} == {id(w) for w in plain.parameters()}
    assert not isinstance(plain.layers, FusedLayers)
    for model in (plain, ours):
        rig = Rig(model, [random_prompt(CONFIG, 30)], method="autoregressive", num_new=4)
        found.append([rig.run(), rig.full.keys[..., :33, :], rig.full.values[..., :33, :]])
    (text, *slots), (other_text, *other_slots) = found
    assert text == other_text
    assert all(map(torch.equal, slots, other_slots))


def test_a_wrong_kernel_fails_the_test_of_every_boot(monkeypatch):
    def compiled(function):
        if function is fused_modules.rotate:
            return lambda x_BTXD, cos, signed_sin: function(x_BTXD, cos, -signed_sin)
        return function

    monkeypatch.setattr(fused_modules, "compiled", compiled)
    with pytest.raises(AssertionError, match="not close"):
        check_kernels(tiny_model(CONFIG))


@pytest.mark.parametrize(
    ("device", "problem", "kernels", "is_fused"),
    [
        ("cuda", "", "", True),
        ("cuda", "gcc not found", "", False),
        ("cuda", "", "off", False),
        ("cpu", "", "", False),
    ],
)
def test_where_kernels_do_not_work_the_model_stays_as_it_is_and_it_says_why(
    device, problem, kernels, is_fused, caplog, monkeypatch
):
    def check(model):
        if problem:
            raise RuntimeError(problem)

    monkeypatch.setenv("MINITRI_KERNELS", kernels)
    monkeypatch.setattr(fused_modules, "check_kernels", check)
    monkeypatch.setattr(Llama, "device", torch.device(device))
    model = tiny_model(CONFIG)
    found = fuse_if_possible(model)
    assert (isinstance(found.layers, FusedLayers), found is not model) == (is_fused, is_fused)
    assert [problem in record.getMessage() for record in caplog.records] == [True] * bool(problem)
