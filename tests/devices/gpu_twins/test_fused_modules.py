"""The network with compiled kernels between its matrices equals the plain one."""

from unittest.mock import Mock

import pytest
import torch

from minitri.core.model.llama import Layers, Llama
from minitri.devices.gpu import fused_modules
from minitri.devices.gpu.fused_modules import FusedLayers, check_kernels, fuse_if_possible
from minitri.devices.replace import replace_modules
from tests.conftest import tiny_model
from tests.core.rigs import Rig, random_prompt, tiny_config

CONFIG = tiny_config(num_layers=3)


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


def test_a_wrong_kernel_fails_the_test_of_every_boot(monkeypatch):
    wrong = {fused_modules.rotate: lambda x_BTXD, cos, sin: fused_modules.rotate(x_BTXD, cos, -sin)}
    monkeypatch.setattr(fused_modules, "compiled", lambda function: wrong.get(function, function))
    with pytest.raises(AssertionError, match="not close"):
        check_kernels(tiny_model(CONFIG))


@pytest.mark.parametrize(
    ("device", "problem", "kernels"),
    [("cuda", "", ""), ("cuda", "gcc not found", ""), ("cuda", "", "off"), ("cpu", "", "")],
)
def test_where_kernels_do_not_work_the_model_stays_as_it_is_and_a_line_says_why(
    device, problem, kernels, caplog, monkeypatch
):
    check = Mock(side_effect=RuntimeError(problem) if problem else None)
    monkeypatch.setenv("MINITRI_KERNELS", kernels)
    monkeypatch.setattr(fused_modules, "check_kernels", check)
    monkeypatch.setattr(Llama, "device", torch.device(device))
    found = fuse_if_possible(tiny_model(CONFIG))
    assert isinstance(found.layers, FusedLayers) is (device == "cuda" and not problem + kernels)
    assert [problem in record.getMessage() for record in caplog.records] == [True] * bool(problem)
