"""What a GPU captures, and when; no step has what a graph cannot hold, see `capture_lint.py`."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest

from minitri.core.decoding.text_filters import TextFilters
from minitri.core.errors import InputError
from minitri.core.settings import SamplingParams, StepPlan
from minitri.core.stack import Stack
from tests.conftest import tiny_model
from tests.core.rigs import GREEDY, Rig, near_copy, tiny_config
from tests.devices.gpu_twins.capture_lint import CaptureError, LintedPool
from tests.devices.gpu_twins.conftest import PROMPTS, TWINS, CpuPool, as_on_a_gpu
from tests.engine.test_switching_plans import AR, forced
from tests.mutation import Mutant, mutated

CONFIG = tiny_config(num_layers=2)
WARM = SamplingParams(0.8, top_k=20, top_p=0.9, min_p=0.01)
GAMMAS = {"gamma1": 2, "gamma2": 3}
WINDOWED = {"changes": {"sliding_window": 20, "sliding_layers": (1,)}}


def tokens(pool, method="triforce", *, lookup=False, changes=None, **how):
    """Tokens, tested and accepted guesses; as on a GPU if steps run in a pool."""
    target = tiny_model(replace(CONFIG, **changes or {}))
    draft = near_copy(target, 0.02)
    if pool:
        for model in (target, draft):
            as_on_a_gpu(model, TWINS["flash"])
    how = {"num_new": 14, "budget": 24, "num_recent_tokens": 60, "method": method, **how}
    rig = Rig(target, PROMPTS, draft=None if lookup else draft, graphs=pool, **how)
    return rig.run(), [(it.num_tested_tokens, it.num_accepted_tokens) for it in rig.stats.stages]


@pytest.mark.parametrize(
    ("method", "sampling", "how"),
    [
        ("auto", GREEDY, {"tree": "3"}),
        ("autoregressive", WARM, {"coupled": True}),
        ("naive", GREEDY, {"tree": "5"}),
        ("naive", WARM, {"lookup": True, "gamma1": 4, "coupled": True}),
        ("naive", SamplingParams(0.7, top_p=0.8), GAMMAS),
        ("retrieval", WARM, {"tree": "2x3", "coupled": True}),
        ("triforce", GREEDY, GAMMAS),
        ("triforce", WARM, {"coupled": True, **GAMMAS}),
        ("triforce", WARM, {"tree": "2x2", **WINDOWED}),
        ("triforce", WARM, {"lookup": True}),
    ],
)
def test_captured_steps_hold_what_a_graph_can_hold_and_give_what_eager_ones_give(
    method, sampling, how, lengths_on_the_device, monkeypatch
):
    """Ragged rows, every method, chains, trees and guesses of no fixed length."""
    monkeypatch.setattr("minitri.core.stack.may_use_clock", lambda *_, **__: False)
    pool = LintedPool()
    assert tokens(pool, method, sampling=sampling, **how) == tokens(
        None, method, sampling=sampling, **how
    )
    assert pool.num_runs > 2 * pool.num_graphs > 0


def test_a_round_is_one_replay_and_captured_once_for_all_runs(lengths_on_the_device):
    """Pass, filters and verdict are one graph, at any temperature, as a drafter's round is."""
    pool, target = LintedPool(), as_on_a_gpu(tiny_model(CONFIG))
    how = {"method": "triforce", "sampling": WARM, "budget": 24, **GAMMAS}
    how |= {"num_recent_tokens": 60, "graphs": pool}
    rig = Rig(target, PROMPTS[:1], draft=as_on_a_gpu(near_copy(target, 0.02)), **how)
    rig.start()
    rig.runners["target"].set_sampling(0, replace(WARM, temperature=0.5, top_p=0.7))
    before, num_guesses = pool.num_runs - rig.num_verdicts(), rig.stats.stages[0].num_rounds
    rig.step()
    num_rounds = (rig.stats.stages[0].num_rounds - num_guesses) / GAMMAS["gamma1"]
    assert pool.num_runs - rig.num_verdicts() - before == num_rounds > 1
    counts = pool.num_runs, pool.num_graphs
    Stack(rig.memory, rig.session.shape)
    assert (pool.num_runs, pool.num_graphs) == counts


def test_a_pass_over_rows_with_text_filters_is_a_replay_too(lengths_on_the_device):
    """Their logits are filtered outside; distributions and a verdict are replays of their own."""
    pool, target = LintedPool(), as_on_a_gpu(tiny_model(CONFIG))
    rig = Rig(target, PROMPTS[:1], method="autoregressive", sampling=WARM, graphs=pool)
    rig.start()
    rig.runners["target"].text_filters[0] = TextFilters(WARM, PROMPTS[0], CONFIG.vocab_size)
    before = pool.num_runs
    rig.step()
    assert pool.num_runs == before + 3


ADDED = Path(__file__).with_name("forbidden_in_graphs.txt").read_text("utf-8").splitlines()
"""The message of a rule, and what trips it where a pass of the model adds it to positions."""


@pytest.mark.parametrize("line", ADDED)
def test_every_rule_is_tripped_by_a_change(line, lengths_on_the_device):
    message, added = line.split("  ")
    old = "self.rope.at(block.positions_BT)"
    new = f"self.rope.at(block.positions_BT + ({added}))"
    mutant = Mutant(message, "core.model.llama:Llama.forward", old, new)
    with mutated(mutant), pytest.raises(CaptureError, match=message):
        tokens(LintedPool(), **GAMMAS)


def test_passes_run_eagerly_where_graphs_have_no_room(lengths_on_the_device, caplog):
    """A line says so. Another problem ends the run."""
    how = {"sampling": WARM, "coupled": True, **GAMMAS}

    def pool(problem: str) -> CpuPool:
        made, first = CpuPool(), [DEFAULT] * 4
        made.record = Mock(wraps=made.record, side_effect=[*first, RuntimeError(problem)])
        return made

    with pytest.raises(InputError, match="not permitted.* cuda_graphs=False"):
        tokens(pool("not permitted"), **how)
    assert tokens(pool("CUDA out of memory"), **how) == tokens(None, **how)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("tree", ["", "1x2"])
def test_a_drafter_that_was_left_out_has_room_for_padded_blocks(
    tree, lengths_on_the_device, monkeypatch
):
    """The drafter reads a whole block into a window that is nearly full, and guesses after it."""
    target, found = as_on_a_gpu(tiny_model(CONFIG)), []
    settings = {"num_recent_tokens": 20, "budget": 240, "gamma1": 2, "gamma2": 12, "tree": tree}
    settings |= {"draft": as_on_a_gpu(near_copy(target, 0.0)), "num_new": 110}
    for graphs in (None, CpuPool()):
        forced(monkeypatch, [*[AR] * 12, StepPlan("triforce", 2, 12, tree)])
        found.append(Rig(target, PROMPTS[:1], graphs=graphs, **settings).run())
    assert found[0] == found[1]
