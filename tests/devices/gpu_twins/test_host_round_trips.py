"""A step of decoding waits for the device once for every verdict, and for nothing else: what asks a
tensor for its numbers, or makes one of a size that depends on them, is counted on a CPU."""

import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minitri.core.graphs import GraphPool
from tests.conftest import tiny_model
from tests.core.rigs import CPU, GREEDY, WARM, Rig, near_copy, random_prompt, tiny_config
from tests.devices.gpu_twins.capture_lint import SIZED_BY_DATA, WAITS, is_masked
from tests.devices.gpu_twins.conftest import SMALL, as_on_a_gpu

CONFIG = tiny_config(num_layers=2)


class Waits(TorchDispatchMode):
    """Notes the functions of the package that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def note(self) -> None:
        frames = traceback.extract_stack()
        self.places.append([it.name for it in frames if "/minitri/" in it.filename][-1])

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in WAITS | SIZED_BY_DATA or is_masked(name, args):
            self.note()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("sampling", "how"),
    [(GREEDY, {}), (WARM, {}), (WARM, {"verification": "token"}), (WARM, {"coupled": True})],
)
@pytest.mark.parametrize("method", ["autoregressive", "naive", "retrieval", "triforce"])
def test_a_step_waits_once_for_every_verdict(
    method, sampling, how, lengths_on_the_device, monkeypatch
):
    target = as_on_a_gpu(tiny_model(CONFIG))
    how = {"draft": as_on_a_gpu(near_copy(target, 0.02)), "method": method, **SMALL, **how}
    how |= {"graphs": GraphPool(CPU), "sampling": sampling, "rebuild_stride": 100, "num_new": 60}
    rig = Rig(target, [random_prompt(CONFIG, 60)], **how)
    tolist = torch.Tensor.tolist
    with torch.inference_mode():
        rig.start()
        rig.session.step()  # in which the drafter reads its window
        before = rig.num_verdicts()
        with Waits() as waits:
            monkeypatch.setattr(torch.Tensor, "tolist", lambda it: (waits.note(), tolist(it))[1])
            for _ in range(3):
                rig.session.step()
    assert waits.places == ["to_host"] * (rig.num_verdicts() - before)
