"""On a GPU seconds are read from events, late, and charged to the stage that spent them; here the
device is a made-up one."""

import torch

import minitri.core.stack
from minitri.core.caches.full import FullCache
from minitri.core.decoding.random_source import IndependentSource
from minitri.core.offload.streams import CudaClock
from minitri.core.runner import ModelRunner
from tests.conftest import tiny_model
from tests.core.rigs import Rig, near_copy, random_prompt, tiny_config

REBUILD = 1000.0
CONFIG = tiny_config(num_layers=1, context_length=512)
SETTINGS = {"method": "triforce", "gamma1": 2, "gamma2": 3, "budget": 48, "num_recent_tokens": 60}
SETTINGS["rebuild_stride"] = 1  # in every step


class Device:
    """A device that does in order what it is given, while the host goes on until a verdict."""

    def __init__(self, monkeypatch) -> None:
        self.queued = self.done = 0.0
        """When all that it was given will be done, and what it has done, in seconds."""
        device = self

        class Event:
            """A mark in the queue."""

            def __init__(self, enable_timing) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.queued

            def synchronize(self) -> None:
                device.done = max(device.done, self.at)

            def elapsed_time(self, other) -> float:
                assert max(self.at, other.at) <= device.done, "not ready"
                return 1e3 * (other.at - self.at)

        layers, verify = FullCache.layers, IndependentSource.verify

        def rebuilt(cache, b):
            self.queued += REBUILD
            return layers(cache, b)

        def verified(*arguments):
            verdict = verify(*arguments)
            self.done = self.queued
            return verdict

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(FullCache, "layers", rebuilt)
        monkeypatch.setattr(IndependentSource, "verify", verified)
        monkeypatch.setattr(minitri.core.stack, "clock_of", lambda _: CudaClock())
        monkeypatch.setattr("minitri.core.stats.time.perf_counter", lambda: self.done)


COSTS = {"draft": 1.0, "retrieval": 10.0, "target": 100.0}


def test_every_stage_is_charged_for_its_own_work(monkeypatch):
    """All of it, the last step's too: a rebuild that the device does during the next guesses is not
    charged to them, and the first one belongs to the prefill."""
    device, target = Device(monkeypatch), tiny_model(CONFIG)
    prompts, draft = [random_prompt(CONFIG, 120)], near_copy(target, 0.02)
    rig = Rig(target, prompts, draft=draft, num_new=24, **SETTINGS)
    names = {id(runner): name for name, runner in rig.runners.items()}

    def timed(run):
        def call(runner, *arguments, **more):
            device.queued += COSTS[names[id(runner)]]
            return run(runner, *arguments, **more)

        return call

    for name in ("next_probs", "next_probs_after"):
        monkeypatch.setattr(ModelRunner, name, timed(getattr(ModelRunner, name)))
    tuner, noted = rig.session.tuner, []
    monkeypatch.setattr(tuner, "note_round", lambda stage, *more: noted.append((stage, more[1])))
    rig.run()
    stats = rig.stats
    assert stats.num_rebuilds > 2
    assert stats.commit_seconds == (stats.num_rebuilds - 1) * REBUILD
    for stage in stats.stages:
        assert stage.seconds == stage.num_rounds * COSTS[stage.name], stage.name
        times = [seconds for name, seconds in noted if name == stage.name]
        assert (len(times), sum(times)) == (stage.num_rounds, stage.seconds)
