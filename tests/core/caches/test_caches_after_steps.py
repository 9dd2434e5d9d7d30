"""After every step of a cascade: the full cache is that of a fresh prefill, and nothing after a
length matters."""

from itertools import product

import pytest
import torch

from minitri.core.runner import ModelRunner
from tests.core.policies import policy_of
from tests.core.rigs import (
    GREEDY,
    WARM,
    Rig,
    fresh_read,
    near_copy,
    plain_tokens,
    random_prompt,
    tiny_config,
    tiny_model,
)

CONFIG = tiny_config()
PROMPTS = [random_prompt(CONFIG, n, seed=n) for n in (50, 1, 23)]
STACKS = [
    ("autoregressive", None),
    ("naive", None),
    ("naive", 0.02),
    ("retrieval", None),
    ("triforce", None),
    ("triforce", 0.02),
    ("triforce", 0.0),
    ("naive tree 3x2", 0.02),
    ("naive tree 7", 0.02),
    ("retrieval tree 5", None),
    ("triforce tree 6", 0.02),
    ("triforce tree 2x2", 0.0),
]
"""Methods, perhaps with a tree, and how much noise makes the drafter differ from the target; None
is the n-gram drafter."""
SMALL = {"budget": 16, "chunk_size": 4, "num_sink_tokens": 2, "num_recent_tokens": 6}
SMALL |= {"gamma1": 2, "gamma2": 4, "rebuild_stride": 9}


def new_rig(method, noise, **settings) -> Rig:
    target = tiny_model(CONFIG)
    draft = None if noise is None else near_copy(target, noise)
    method, _, tree = method.partition(" tree ")
    settings = {"num_new": 20, **SMALL, "tree": tree, **settings}
    return Rig(target, PROMPTS, draft=draft, method=method, **settings)


@pytest.mark.parametrize(("sampling", "coupled"), [(GREEDY, False), (WARM, False), (WARM, True)])
@pytest.mark.parametrize(("method", "noise"), STACKS)
def test_the_full_cache_equals_a_fresh_prefill_of_the_accepted_tokens(
    method, noise, sampling, coupled
):
    """Every other cache has read a beginning of them: all, but what a drafter reads before its next
    guess, which is at most a block once it has begun."""
    target, num_checked = tiny_model(CONFIG), 0

    def compare(rig):
        nonlocal num_checked
        for (name, runner), (b, sequence) in product(rig.runners.items(), enumerate(rig.sequences)):
            missing = len(sequence) - 1 - runner.cache.num_tokens[b]
            if rig.cascade.active[b]:
                limit = rig.speculation.max_block if num_checked else len(sequence)
                assert 0 <= missing <= (limit if name == "draft" else 0)
            else:
                assert runner.cache.num_tokens[b] == runner.cache.lengths[b] == 0
        for b, sequence in enumerate(rig.sequences):
            if not rig.cascade.active[b]:
                assert rig.full.lengths[b] == 0
                continue
            length = len(sequence) - 1
            assert rig.full.lengths[b] == length
            if length:
                fresh, _ = fresh_read(target, sequence[:-1])
                for ours, theirs in ((rig.full.keys, fresh.keys), (rig.full.values, fresh.values)):
                    assert torch.allclose(
                        ours[:, b, :, :length], theirs[:, 0, :, :length], atol=1e-5
                    )
                num_checked += 1

    rig = new_rig(method, noise, sampling=sampling, coupled=coupled)
    rig.run(compare)
    assert num_checked >= 9
    if sampling is GREEDY and method != "autoregressive":
        assert rig.stats.levels[-1].num_accepted_tokens > 0


def poison(runner) -> None:
    """Fills everything after the valid slots of a cache with NaN."""
    cache = runner.cache
    for b, length in enumerate(cache.lengths):
        for name in ("raw_keys", "keys", "values"):
            if hasattr(cache, name):
                getattr(cache, name)[:, b, :, length:] = torch.nan


def poison_all(rig: Rig) -> None:
    """Those of all caches, and the memory of queries, too."""
    for runner in rig.runners.values():
        poison(runner)
        if runner.passes.queries_LBTHD is not None:
            runner.passes.queries_LBTHD.fill_(torch.nan)


@pytest.mark.parametrize(("sampling", "coupled"), [(GREEDY, False), (WARM, True)])
@pytest.mark.parametrize(
    ("method", "noise", "policy"),
    [(*stack, "retrieval") for stack in STACKS]
    + [("triforce", 0.02, name) for name in ("streaming", "topk", "received")],
)
def test_poisoned_slots_change_nothing(method, noise, policy, sampling, coupled, monkeypatch):
    """A cache of NaN from the start, after every step, and whenever a level has taken guesses back
    within one: the same tokens, and the same guesses on the way."""
    settings = {"sampling": sampling, "coupled": coupled, "num_new": 14}
    clean, poisoned = (
        new_rig(method, noise, policy=policy_of(policy), **settings) for _ in range(2)
    )
    poison_all(poisoned)
    num_poisoned = 0

    crop = ModelRunner.crop

    def crop_and_poison(runner, lengths):
        nonlocal num_poisoned
        crop(runner, lengths)
        poison(runner)
        num_poisoned += 1

    with monkeypatch.context() as patching:
        patching.setattr(ModelRunner, "crop", crop_and_poison)
        tokens = poisoned.run(poison_all)
    assert tokens == clean.run()
    assert tokens == plain_tokens(tiny_model(CONFIG), PROMPTS, **settings)
    ours, theirs = ([level.as_dict() for level in rig.stats.levels] for rig in (poisoned, clean))
    assert ours == theirs
    assert torch.isnan(poisoned.full.keys).any()
    assert num_poisoned >= 10
