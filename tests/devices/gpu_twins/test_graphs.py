"""Steps over static buffers give what eager ones give; see `test_capture_lint.py`, too."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from minitri.core.errors import InputError
from minitri.core.graphs import filters_of
from minitri.core.runner import ModelRunner
from minitri.core.settings import GenerationConfig, SamplingParams, StepPlan
from tests.conftest import tiny_model
from tests.core.rigs import Rig, near_copy, new_cache, tiny_config
from tests.devices.gpu_twins.conftest import PROMPTS, CpuPool, as_on_a_gpu
from tests.engine.test_switching_plans import AR, forced

CONFIG = tiny_config(num_layers=3)


def test_a_captured_pass_gives_logits_too_and_a_closed_pool_captures_nothing(
    lengths_on_the_device,
):
    """For log-probabilities; of a shape that was not captured, eagerly."""
    model, pool, found = as_on_a_gpu(tiny_model(CONFIG)), CpuPool(), []
    for graphs in (pool, None):
        settings = {"vocab_size": CONFIG.vocab_size + 2, "graphs": graphs, "block_sizes": {1, 4}}
        runner = ModelRunner(model, new_cache(CONFIG), SamplingParams(0.7), **settings)
        pool.is_open = False
        with torch.inference_mode():
            passes = [runner.next_probs([list(range(n))], [True]) for n in (1, 2, 5, 12)]
        found.append([[it.probs_BNV[:, 0], it.logits_BNV[:, 0]] for it in passes])
        assert found[-1][0][1].shape == (1, CONFIG.vocab_size)
    torch.testing.assert_close(*found)
    assert pool.num_graphs == 4  # of each size the forward pass, and the distributions


def test_a_capture_that_fails_is_one_line():
    with pytest.raises(InputError, match="not permitted.* cuda_graphs=False"):
        CpuPool().run(Mock(side_effect=RuntimeError("not permitted")), torch.zeros(1))


def test_filters_of_several_kinds_are_refused_where_they_would_be_captured():
    wanted = [SamplingParams(0.6), SamplingParams(0.6, top_p=0.9)]
    on_gpu, on_cpu = (SimpleNamespace(device=torch.device(name)) for name in ("cuda", "cpu"))
    with pytest.raises(InputError, match="of one kind"):
        filters_of(wanted, on_gpu, GenerationConfig())
    assert filters_of([SamplingParams(), wanted[1]], on_gpu, GenerationConfig()) == wanted[1]
    assert filters_of(wanted, on_cpu, GenerationConfig()) == wanted[0]
    assert filters_of(wanted, on_gpu, GenerationConfig(cuda_graphs=False)) == wanted[0]


@pytest.mark.parametrize("tree", ["", "1x2"])
def test_a_drafter_that_was_left_out_has_room_for_padded_blocks(
    tree, lengths_on_the_device, monkeypatch
):
    """It reads a whole block into a window that is nearly full, and goes on guessing after it."""
    target, found = as_on_a_gpu(tiny_model(CONFIG)), []
    settings = {"num_recent_tokens": 20, "budget": 240, "gamma1": 2, "gamma2": 12, "tree": tree}
    settings |= {"draft": as_on_a_gpu(near_copy(target, 0.0)), "num_new": 110}
    for graphs in (None, CpuPool()):
        forced(monkeypatch, [*[AR] * 12, StepPlan("triforce", 2, 12, tree)])
        found.append(Rig(target, PROMPTS[:1], graphs=graphs, **settings).run())
    assert found[0] == found[1]
