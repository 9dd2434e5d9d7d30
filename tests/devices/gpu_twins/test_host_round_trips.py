"""How often a step of decoding waits for the device: once for every verdict, and for nothing else;
and what rebuilding a retrieval cache launches.

What would be a wait on a GPU is counted on a CPU: whatever asks a tensor for its numbers, or makes
a tensor whose shape depends on them.
"""

import traceback
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minitri.core.caches.full import FullCache
from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.graphs import GraphPool
from minitri.core.settings import SpeculationConfig
from tests.conftest import tiny_model
from tests.core.rigs import CPU, GREEDY, WARM, Rig, near_copy, random_prompt, tiny_config
from tests.devices.gpu_twins.capture_lint import SIZED_BY_DATA, WAITS, is_masked
from tests.devices.gpu_twins.conftest import as_on_a_gpu

CONFIG = tiny_config(num_layers=2)


class Waits(TorchDispatchMode):
    """Notes the functions that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def note(self) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/minitri/" in frame.filename]
        self.places.append(frames[-1].name)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in WAITS | SIZED_BY_DATA or is_masked(name, args):
            self.note()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "how", [{"verification": "block"}, {"verification": "token"}, {"coupled": True}]
)
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize("method", ["autoregressive", "naive", "retrieval", "triforce"])
def test_a_step_waits_once_for_every_verdict(
    method, sampling, how, lengths_on_the_device, monkeypatch
):
    target = as_on_a_gpu(tiny_model(CONFIG))
    draft = as_on_a_gpu(near_copy(target, 0.02))
    settings = {"method": method, "sampling": sampling, "gamma1": 2, "gamma2": 4, **how}
    settings |= {"budget": 32, "num_recent_tokens": 20, "rebuild_stride": 100, "num_new": 60}
    prompts = [random_prompt(CONFIG, 60)]
    rig = Rig(target, prompts, draft=draft, graphs=GraphPool(CPU), **settings)
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


class Operations(TorchDispatchMode):
    """Counts operations, views included."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_a_rebuild_launches_as_much_for_many_heads_as_for_two():
    """Of the layers of a cache on the device and of a staged one, whose tokens come first."""
    found = set()
    for num_heads, is_staged in product((2, 8), (False, True)):
        config = tiny_config(num_layers=1, num_heads=num_heads, num_kv_heads=num_heads)
        full = FullCache.allocate(config, 1, 128, dtype=torch.float32, device=CPU)
        settings = SpeculationConfig("retrieval", budget=32, chunk_size=4)
        small = RetrievalCache(full, settings, budgets=[32], num_heads=num_heads)
        keys, values = (slots[0, 0].normal_() for slots in (full.keys, full.values))
        small.observe(0, torch.randn(1, 4, num_heads, config.head_dim))
        if is_staged:
            keys, values = (
                it.transpose(0, 1).contiguous().transpose(0, 1) for it in (keys, values)
            )
        with Operations() as counted:
            small._select(0, 0, 128, torch.randn(num_heads, config.head_dim), keys, values)
        found.add(counted.count)
        for chosen, slots in ((small.keys, keys), (small.values, values)):
            for k in range(num_heads):  # each token is one of its own head
                assert (chosen[0, 0, k, :32, None] == slots[k]).all(2).any(1).all()
    assert len(found) == 1
    assert 0 < found.pop() < 80
