"""Seconds that a device's clock tells late are charged to the stage that spent them."""

from minitri.core.stats import Clock
from tests.core.rigs import Rig, near_copy, random_prompt, tiny_config, tiny_model

COSTS = {"draft": 1.0, "retrieval": 10.0, "target": 100.0}
REBUILD = 1000.0
CONFIG = tiny_config(num_layers=1, context_length=512)
SETTINGS = {"method": "triforce", "budget": 48, "num_recent_tokens": 60, "rebuild_stride": 1}
GAMMAS = {"gamma1": 2, "gamma2": 3}


class LateClock(Clock):
    """Knows what was queued, and tells it when the host waits, as the clock of a GPU does."""

    def __init__(self) -> None:
        self.queued, self.untold = 0.0, []

    def now(self):
        return self.queued

    def since(self, start, take):
        self.untold.append((take, self.queued - start))

    def settle(self):
        for take, seconds in self.untold:
            take(seconds)
        self.untold.clear()


def test_every_stage_is_charged_for_its_own_work():
    """Not for a rebuild that the device does during the next guesses."""
    target, clock = tiny_model(CONFIG), LateClock()
    draft, prompts = near_copy(target, 0.02), [random_prompt(CONFIG, 120)]
    rig = Rig(target, prompts, draft=draft, num_new=24, **SETTINGS, **GAMMAS)
    rig.session.meter.clock = clock

    def make_cost(owner, name, seconds):
        function = getattr(owner, name)

        def call(*arguments):
            clock.queued += seconds
            return function(*arguments)

        setattr(owner, name, call)

    make_cost(rig.full, "layers", REBUILD)
    for stage, runner in rig.runners.items():
        make_cost(runner, "next_probs", COSTS[stage])
    make_cost(rig.runners["draft"], "next_probs_after", COSTS["draft"])
    rig.run()
    stats = rig.stats
    assert stats.num_rebuilds > 2
    assert stats.commit_seconds == (stats.num_rebuilds - 1) * REBUILD
    for stage in stats.stages:
        assert stage.seconds == stage.num_rounds * COSTS[stage.name], stage.name
