"""Seconds of a GPU, here a made-up one, are charged late to the stage that spent them."""

import torch

import minitri.core.stack
from minitri.core.caches.full import FullCache
from minitri.core.decoding.random_source import IndependentSource
from minitri.core.offload.streams import CudaClock
from minitri.core.runner import ModelRunner
from tests.conftest import tiny_model
from tests.core.rigs import Rig, near_copy, random_prompt, tiny_config
from tests.devices.gpu_twins.conftest import SMALL

COSTS = {"draft": 1.0, "retrieval": 10.0, "target": 100.0}
REBUILD = 1000.0
CONFIG = tiny_config(num_layers=1, context_length=512)
SETTINGS = {"method": "triforce", "rebuild_stride": 1, **SMALL, "budget": 48}


class Event:
    """A mark in the queue of a device that does in order what it is given."""

    queued = done = 0.0
    """When all that the device was given will be done, and what it has done, in seconds."""

    def record(self) -> None:
        self.place = Event.queued

    def synchronize(self) -> None:
        Event.done = max(Event.done, self.place)

    def elapsed_time(self, other) -> float:
        assert max(self.place, other.place) <= Event.done, "not ready"
        return 1e3 * (other.place - self.place)


def test_every_stage_is_charged_for_its_own_work(monkeypatch):
    """Not for a rebuild that the device does during the next guesses."""
    monkeypatch.setattr(torch.cuda, "Event", lambda *, enable_timing: Event())
    monkeypatch.setattr(minitri.core.stack, "clock_of", lambda _: CudaClock())

    def wrap(owner, name, seconds=lambda *_: 0.0, *, is_awaited=False):
        """Makes a function give the device work, or the host wait for all of it."""
        function = getattr(owner, name)

        def call(*arguments, **more):
            Event.queued += seconds(*arguments)
            result = function(*arguments, **more)
            Event.done = Event.queued if is_awaited else Event.done
            return result

        monkeypatch.setattr(owner, name, call)

    target, prompts = tiny_model(CONFIG), [random_prompt(CONFIG, 120)]
    wrap(FullCache, "layers", lambda *_: REBUILD)
    wrap(IndependentSource, "verify", is_awaited=True)
    rig = Rig(target, prompts, draft=near_copy(target, 0.02), num_new=24, **SETTINGS)
    costs = {id(runner): COSTS[name] for name, runner in rig.runners.items()}
    for name in ("next_probs", "next_probs_after"):
        wrap(ModelRunner, name, lambda runner, *_: costs[id(runner)])
    rig.run()
    stats = rig.stats
    assert stats.num_rebuilds > 2
    assert stats.commit_seconds == (stats.num_rebuilds - 1) * REBUILD
    for stage in stats.stages:
        assert stage.seconds == stage.num_rounds * COSTS[stage.name], stage.name
