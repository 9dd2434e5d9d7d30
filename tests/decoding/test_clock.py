"""Times that are known late, as a GPU's, reach the statistics and the autotuner all the same."""

import pytest
import torch

from minitri import stack
from minitri.stats import Clock
from tests.cascades import Rig, near_copy, random_prompt
from tests.conftest import tiny_config, tiny_model


class LateClock(Clock):
    """Time passes by one with every mark; what it took is known when the device is done."""

    def __init__(self) -> None:
        self.time, self.open, self.num_late = 0, [], 0

    def now(self):
        self.time += 1
        return self.time

    def since(self, start, take):
        self.open.append((self.now() - start, take))

    def settle(self):
        self.num_late = max(self.num_late, len(self.open))
        for seconds, take in self.open:
            take(seconds)
        self.open.clear()


@pytest.mark.parametrize("tree", ["", "4"])
def test_every_round_is_timed_once_although_it_is_known_late(tree, monkeypatch):
    clock, noted = LateClock(), []
    monkeypatch.setattr(stack, "clock_of", lambda device: clock)
    target = tiny_model(tiny_config(num_layers=2))
    settings = {"budget": 32, "num_recent_tokens": 20, "gamma1": 2, "gamma2": 3, "tree": tree}
    prompts, draft = [random_prompt(target.config, 40)], near_copy(target, 0.02)
    rig = Rig(target, prompts, draft=draft, num_new=60, method="triforce", **settings)
    monkeypatch.setattr(rig.session.tuner, "note_round", lambda *args: noted.append(args))
    with torch.inference_mode():
        rig.start()
        for _ in range(5):
            rig.cascade.step()
    clock.settle()
    assert clock.num_late > 2
    for stage in rig.stats.stages:
        times = [seconds for name, _, seconds in noted if name == stage.name]
        assert sum(times) == stage.seconds > 0
        assert len(times) == stage.num_rounds
    assert rig.stats.commit_seconds > 0
