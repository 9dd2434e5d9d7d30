"""The steps that a GPU captures hold nothing that a graph cannot hold; see `capture_lint.py`."""

import functools
from unittest.mock import MagicMock

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from minitri.core.model.llama import Layers
from minitri.core.settings import METHODS, SamplingParams
from minitri.devices.gpu import fused_modules
from minitri.devices.gpu.fused_modules import FusedLayers
from minitri.devices.replace import replace_modules
from tests.conftest import tiny_model
from tests.core.rigs import GREEDY, Rig, near_copy, plain_tokens, random_prompt, tiny_config
from tests.devices.gpu_twins.capture_lint import CaptureError, LintedPool
from tests.devices.gpu_twins.conftest import PROMPTS, SMALL, TWINS, as_on_a_gpu
from tests.mutation import Mutant, mutated

CONFIG = tiny_config(num_layers=2)
WARM = SamplingParams(0.8, top_k=20, top_p=0.9, min_p=0.01)


def tokens(pool, backend=None, *, method, sampling=GREEDY, coupled=False, lookup=False, **more):
    """The tokens of a run, and how many guesses were tested and accepted."""
    target = tiny_model(CONFIG)
    draft = near_copy(target, 0.02)
    if backend is not None:
        for model in (target, draft):
            as_on_a_gpu(model, backend)
    settings = {"method": method, "sampling": sampling, "coupled": coupled, "num_new": 20, **more}
    rig = Rig(target, PROMPTS, draft=None if lookup else draft, graphs=pool, **settings)
    new = rig.run()
    assert rig.stats.num_graphs == (pool.num_graphs if pool else 0)
    stages = [] if method == "auto" else rig.stats.stages  # auto follows the clock
    return new, [(stage.num_tested_tokens, stage.num_accepted_tokens) for stage in stages]


@pytest.mark.parametrize("sampling", [GREEDY, WARM, SamplingParams(0.7, top_p=0.8)])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_captured_steps_hold_what_a_graph_can_hold_and_give_what_eager_ones_give(
    method, sampling, coupled, lengths_on_the_device
):
    """Ragged rows, every method and twin of a backend."""
    how = {"method": method, "sampling": sampling, "coupled": coupled, **SMALL}
    plain = tokens(None, **how)
    for backend in TWINS.values():
        pool = LintedPool()
        assert tokens(pool, backend, **how) == plain
        assert pool.num_runs > 2 * pool.num_graphs > 0


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("naive", {"tree": "5"}),
        ("retrieval", {"tree": "2x3"}),
        ("triforce", {"tree": "2x2"}),
        ("auto", {"tree": "3"}),
        ("naive", {"lookup": True, "gamma1": 4}),
        ("triforce", {"lookup": True}),
    ],
)
def test_so_do_trees_and_guesses_of_no_fixed_length(
    method, how, sampling, coupled, lengths_on_the_device, monkeypatch
):
    monkeypatch.setattr("minitri.core.stack.may_use_clock", lambda *_, **__: False)
    small = {"budget": 24, "num_recent_tokens": 60}
    how = {"method": method, "sampling": sampling, "coupled": coupled, **small, **how}
    pool = LintedPool()
    assert tokens(pool, TWINS["math"], **how) == tokens(None, **how)
    assert pool.num_runs > 2 * pool.num_graphs > 0


def hidden(kernel):
    """An interpreted kernel whose inside is not watched, as that of a compiled one. It is given
    other memory of the same contents, as the interpreter keeps what it was given for a while."""

    def twin(tensor):
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().clone(), *place)

    def launch(grid, *args, **options) -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            twins = {n: twin(it) for n, it in enumerate(args) if isinstance(it, torch.Tensor)}
            kernel[grid](*(twins.get(n, it) for n, it in enumerate(args)), **options)
            for n, it in twins.items():
                args[n].copy_(it)

    launches = MagicMock()
    launches.__getitem__.side_effect = lambda grid: functools.partial(launch, grid)
    return launches


@pytest.mark.parametrize("method", ["naive", "retrieval", "triforce"])
def test_so_do_steps_with_fused_layers_and_kernels_of_triton(
    method, lengths_on_the_device, monkeypatch
):
    """By the interpreter, and by the functions that would be compiled."""
    module = pytest.importorskip(
        "minitri.devices.gpu.kernels.flash_decoding", reason="needs triton"
    )
    for name in ("attend_piece", "merge_pieces"):
        monkeypatch.setattr(module, name, hidden(getattr(module, name)))
    monkeypatch.setattr(fused_modules, "compiled", lambda function: function)
    config = tiny_config(num_layers=2, head_dim=16)
    target = tiny_model(config)
    settings = {"method": method, "num_new": 6, "budget": 24, "num_recent_tokens": 20}
    settings |= {"gamma1": 1, "gamma2": 2, "sampling": WARM, "coupled": True}
    prompts = [random_prompt(config, 40)]
    plain = plain_tokens(target, prompts, sampling=WARM, coupled=True, num_new=6)
    models = [
        as_on_a_gpu(replace_modules(model, {Layers: FusedLayers}), module.attend_short_block)
        for model in (target, near_copy(target, 0.02))
    ]
    pool = LintedPool()
    rig = Rig(models[0], prompts, draft=models[1], graphs=pool, **settings)
    assert rig.run() == plain
    assert pool.num_runs > 2 * pool.num_graphs > 0


ADDED = {
    "item: the host waits for a number": "int(block.positions_BT[0, 0])",
    "tolist: the host waits for a number": "len(block.positions_BT.tolist())",
    "bernoulli_: random numbers that are no input": "block.positions_BT.clone().bernoulli_()",
    "made in a step stays": "vars(self).setdefault('all', []).append(block.positions_BT + 0) or 0",
    "lift_fresh: numbers from the host": "torch.tensor([0])",
    "zeros: numbers from the host": "torch.zeros(1).long()",
    "index: a size that depends on data": "block.positions_BT[block.positions_BT > -1].sum()",
    "nonzero: a size that depends on data": "block.positions_BT.nonzero().sum()",
    "has moved since the capture": "setattr(cache, 'keys', cache.keys.clone()) or 0",
}
"""What trips a rule, by its message, where a pass of the model adds it to positions."""


@pytest.mark.parametrize("message", ADDED)
def test_every_rule_is_tripped_by_a_change(message, lengths_on_the_device):
    new = f"self.rope.at(block.positions_BT + ({ADDED[message]}))"
    mutant = Mutant(message, "Llama.forward", "self.rope.at(block.positions_BT)", new, "")
    with mutated(mutant), pytest.raises(CaptureError, match=message):
        tokens(LintedPool(), TWINS["math"], method="triforce", **SMALL)


def test_an_output_that_outlives_the_next_step_is_noticed(lengths_on_the_device):
    """Distributions that are views of a step's buffer."""
    new = "self.graphs.run(self.passes.probs, filtered_BNV)"
    old = f"{new}.clone()"
    how = {"method": "triforce", "sampling": WARM, "coupled": True, **SMALL}
    plain = tokens(None, **how)
    with mutated(Mutant("rows not copied", "ModelRunner._output", old, new, "")):
        try:
            found = tokens(LintedPool(), TWINS["math"], **how)
        except ArithmeticError:
            found = None
    assert found != plain
