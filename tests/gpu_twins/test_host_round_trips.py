"""How often a step of decoding waits for the device: once for every verdict, and for nothing else.

What would be a wait on a GPU is counted on a CPU: whatever asks a tensor for its numbers, or makes
a tensor whose shape depends on them.
"""

import contextlib
import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minitri.decoding import noise
from minitri.gpu.graphs import GraphPool
from tests.cascades import GREEDY, WARM, Rig, near_copy, random_prompt
from tests.conftest import CPU, tiny_config, tiny_model
from tests.gpu_twins.conftest import as_on_a_gpu

CONFIG = tiny_config(num_layers=2)
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_consecutive"}


class Waits(TorchDispatchMode):
    """Notes where something waits."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def note(self) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/minitri/" in frame.filename]
        self.places.append(frames[-1].name)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITS or by_mask:
            self.note()
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def waits(monkeypatch):
    """Everything that waits meanwhile, by the function that does."""
    with monkeypatch.context() as patch, Waits() as mode:
        tolist = torch.Tensor.tolist

        def noted(tensor):
            mode.note()
            return tolist(tensor)

        patch.setattr(torch.Tensor, "tolist", noted)
        yield mode.places


@pytest.mark.parametrize(
    "how", [{"verification": "block"}, {"verification": "token"}, {"coupled": True}]
)
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize("method", ["autoregressive", "naive", "retrieval", "triforce"])
def test_a_step_waits_once_for_every_verdict(
    method, sampling, how, lengths_on_the_device, monkeypatch
):
    monkeypatch.setattr(noise, "gumbel_scores", noise._dense_scores)  # as on a GPU
    target = tiny_model(CONFIG)
    draft = near_copy(target, 0.02)
    for model in (target, draft):
        as_on_a_gpu(model)
    settings = {"method": method, "sampling": sampling, "gamma1": 2, "gamma2": 4, **how}
    settings |= {"budget": 32, "num_recent_tokens": 20, "rebuild_stride": 100, "num_new": 60}
    prompts = [random_prompt(CONFIG, 60)]
    rig = Rig(target, prompts, draft=draft, graphs=GraphPool(CPU), **settings)
    with torch.inference_mode():
        rig.start()
        rig.cascade.step()  # in which the drafter reads its window
        stages = rig.stats.stages
        before = [stage.num_rounds for stage in stages]
        with waits(monkeypatch) as places:
            for _ in range(3):
                rig.cascade.step()
    rounds = [stage.num_rounds - num for stage, num in zip(stages, before, strict=True)]
    assert places == ["_on_host"] * sum(rounds[1:] or rounds)
