"""A drafter's round in one call of the kernels has the bits of single passes."""

import copy
import gc
import weakref
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from minitri import SamplingParams
from minitri.devices.choose import drafter_in_few_bits
from minitri.devices.cpu.kernel_layers import use_kernels
from minitri.devices.cpu.kernels import load_kernels
from tests.conftest import tiny_model
from tests.core.rigs import GREEDY, Rig, random_prompt, tiny_config

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")

CONFIG = tiny_config(hidden_size=64, intermediate_size=96, context_length=512)
PROMPTS = [random_prompt(CONFIG, length, seed=length) for length in (1, 9, 150)]
WINDOW = {"num_sink_tokens": 3, "num_recent_tokens": 12}
FILTERED = SamplingParams(1.0, 20, top_p=0.9, min_p=0.02)


def models_of(kind: str, dtype: torch.dtype):
    """A target and its drafter, on kernels; vocabulary, head and embeddings may be others."""
    config = replace(CONFIG, tie_word_embeddings="tied" in kind)
    target = tiny_model(config, dtype=dtype)
    size = {"smaller": 50, "larger": 77}.get(kind, config.vocab_size)
    config = replace(config, vocab_size=size)
    if "lent" in kind:
        config = replace(config, draft_of="target", head_size=40, tie_word_embeddings=False)
    lender = target if "lent" in kind else None
    draft = type(target)(config, dtype=dtype, device=target.device, target=lender)
    generator = torch.manual_seed(5)
    for parameter in draft.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    if "lent" in kind:
        draft.lm_head.token_ids.copy_(torch.randperm(size, generator=generator)[:40])
    for model in (target, draft):
        use_kernels(model, load_kernels())
    return target, drafter_in_few_bits(draft.eval(), "auto" if "4 bits" in kind else "same")


def check_rounds(models, sampling=FILTERED, **options) -> None:
    """Three rows with filters of their own, of which the middle one ends first, say and hold the
    same by rounds in one call and by single passes."""
    target, draft = models
    single = copy.copy(draft)
    single.execution = replace(draft.execution, draft_round=None)
    call = Mock(side_effect=draft.execution.draft_round)
    draft.execution = replace(draft.execution, draft_round=call)
    settings = {"sampling": sampling, "method": "naive", "num_new": 999, **WINDOW, **options}
    rigs = [Rig(target, PROMPTS, draft=it, **settings) for it in (draft, single)]
    for rig in rigs:
        rig.runners["draft"].sampling[1] = replace(sampling, top_k=7)
        rig.start()
    for number in range(20):
        if number == 6:
            for rig in rigs:
                rig.cascade.retire(1)
        ours, theirs = (rig.step() for rig in rigs)
        caches = [rig.runners["draft"].cache for rig in rigs]
        assert caches[0].lengths == caches[1].lengths
        for b, row in ours.items():
            assert (row.tokens, row.origins) == (theirs[b].tokens, theirs[b].origins)
            for name in ("raw_keys", "keys", "values"):
                slots = (getattr(cache, name)[:, b, :, : cache.lengths[b]] for cache in caches)
                assert torch.equal(*slots)
    assert call.called


@pytest.mark.parametrize(
    ("kind", "dtype", "sampling", "gamma1"),
    [
        ("same", torch.float32, FILTERED, 1),
        ("tied", torch.bfloat16, SamplingParams(1.0), 3),
        ("4 bits", torch.bfloat16, GREEDY, 2),
        ("tied 4 bits", torch.float32, FILTERED, 3),
        ("lent", torch.bfloat16, FILTERED, 3),
        ("lent tied", torch.float16, SamplingParams(0.6, top_p=0.9), 8),
        ("smaller", torch.float32, SamplingParams(0.6), 3),
        ("larger", torch.float32, FILTERED, 3),
    ],
)
def test_a_round_has_the_bits_of_single_passes(kind, dtype, sampling, gamma1):
    """After slides of the window, next to rejected guesses."""
    check_rounds(models_of(kind, dtype), sampling, gamma1=gamma1)


def test_rounds_below_a_retrieval_level_have_these_bits():
    models = models_of("lent", torch.float32)
    check_rounds(models, gamma1=2, method="triforce", gamma2=4, budget=32)


def test_what_does_not_fit_is_refused():
    target, draft = models_of("same", torch.float32)
    rig = Rig(target, PROMPTS, draft=draft, method="naive", gamma1=2)
    runner, guess = rig.runners["draft"], draft.execution.draft_round
    rows, filters, V = [[1], [2, 3], [4]], runner.sampling, CONFIG.vocab_size
    numbers_BN = torch.zeros(3, 2, dtype=torch.float64)
    other = copy.copy(runner.cache)
    other.values = other.values.bfloat16()
    for wrong in (
        (runner.cache, rows, numbers_BN.float(), filters),
        (runner.cache, rows, numbers_BN[:, :0], filters),
        (runner.cache, rows, numbers_BN[:2], filters),
        (runner.cache, rows, torch.zeros(3, runner.cache.capacity).double(), filters),
        (runner.cache, rows, torch.zeros(2, 3, dtype=torch.float64).t(), filters),
        (runner.cache, rows[:2], numbers_BN, filters),
        (runner.cache, [[1], [], [4]], numbers_BN, filters),
        (runner.cache, rows, numbers_BN, filters[:2]),
        (other, rows, numbers_BN, filters),
    ):
        with pytest.raises(ValueError, match="the CPU kernels cannot take"):
            guess(*wrong, V)
    guess(runner.cache, [[10**9], [-(10**9)], [1]], numbers_BN, filters, V)  # some token instead
    guess(
        runner.cache, rows, torch.zeros(3, runner.cache.capacity - 1).double(), filters, V
    )  # fits


def test_what_one_call_cannot_do_is_done_by_single_passes():
    """Coupled noise; trees; embeddings of another number type."""
    target, draft = models_of("lent", torch.float32)
    draft.execution = replace(draft.execution, draft_round=Mock(side_effect=AssertionError))
    for options in ({"coupled": True}, {"tree": "2x2"}):
        Rig(target, PROMPTS, draft=draft, method="naive", num_new=9, **WINDOW, **options).run()
    draft.lent_embedding = tiny_model(CONFIG, dtype=torch.bfloat16).embed
    draft.execution = replace(draft.execution, draft_round=None)
    assert drafter_in_few_bits(draft, "same").execution.draft_round is None


def test_a_drafter_without_users_is_freed_at_once():
    _, draft = models_of("same", torch.float32)
    weights = weakref.ref(draft.norm.weight)
    gc.disable()
    try:
        del draft
        assert weights() is None
    finally:
        gc.enable()
