"""After every step of a cascade: the full cache is that of a fresh prefill, and nothing after a
length matters."""

import functools
import json
from pathlib import Path

import pytest
import torch

from minitri.core.decoding.level import Level
from tests.core.rigs import (
    GREEDY,
    WARM,
    Rig,
    fresh_read,
    near_copy,
    policy_of,
    random_prompt,
    tiny_config,
    tiny_model,
)

CONFIG = tiny_config()
TARGET = tiny_model(CONFIG)
PROMPTS = [random_prompt(CONFIG, n, seed=n) for n in (50, 1, 23)]
STACKS = Path(__file__).with_name("stacks.txt").read_text("utf-8").splitlines()
"""Methods, perhaps with a tree; how much noise makes the drafter differ from the target, null being
the n-gram drafter; and policies."""
SMALL = {"budget": 16, "chunk_size": 4, "num_sink_tokens": 2, "num_recent_tokens": 6}
SMALL |= {"gamma1": 2, "gamma2": 4, "rebuild_stride": 9}
draft_of = functools.cache(lambda noise: None if noise is None else near_copy(TARGET, noise))


def poison(cache) -> None:
    """Fills everything after the valid slots of a cache with NaN."""
    for b, length in enumerate(cache.lengths):
        for name in ("raw_keys", "keys", "values"):
            if hasattr(cache, name):
                getattr(cache, name)[:, b, :, length:] = torch.nan


def poison_all(rig: Rig) -> None:
    """Fills all that is not valid in all caches, and the memory of queries, with NaN."""
    for runner in rig.runners.values():
        poison(runner.cache)
    if rig.small is not None:
        rig.small.queries_LBTHD.fill_(torch.nan)


def check_caches(rig: Rig, *, has_begun: bool) -> None:
    """The full cache is a fresh prefill of all but the last token; others have read a beginning of
    it: all, but what they take before their next guess, at most a block once it has begun."""
    for b, sequence in enumerate(rig.sequences):
        length = len(sequence) - 1 if rig.cascade.active[b] else 0
        for name, runner in rig.runners.items():
            missing = length - runner.cache.num_tokens[b]
            limit = rig.speculation.max_block if has_begun else length
            assert 0 <= missing <= (limit if name != "target" and length else 0)
        assert rig.full.lengths[b] == length
        if length:
            fresh, _ = fresh_read(TARGET, sequence[:-1])
            for ours, theirs in ((rig.full.keys, fresh.keys), (rig.full.values, fresh.values)):
                ours_LKSD, theirs_LKSD = ours[:, b, :, :length], theirs[:, 0, :, :length]
                assert torch.allclose(ours_LKSD, theirs_LKSD, atol=1e-5)


@pytest.mark.parametrize("stack", STACKS)
def test_caches_hold_the_accepted_tokens_and_rejected_ones_leave_no_trace(stack, monkeypatch):
    """The same tokens, and the same guesses on the way, with NaN in all other slots from the start,
    after every step, and whenever a level has taken guesses back within one."""
    name, noise, policy = stack.split("  ")
    method, _, tree = name.partition(" tree ")
    sampling = WARM if STACKS.index(stack) % 4 == 2 else GREEDY
    how = {"method": method, "tree": tree, "sampling": sampling, "num_new": 14, **SMALL}
    how["draft"] = draft_of(json.loads(noise))
    clean, poisoned = (Rig(TARGET, PROMPTS, policy=policy_of(policy), **how) for _ in range(2))
    num_steps, num_crops, crop = 0, 0, Level.crop

    def crop_and_poison(level, lengths):
        nonlocal num_crops
        crop(level, lengths)
        poison(level.runner.cache)
        num_crops += 1

    def check_and_poison(rig):
        nonlocal num_steps
        check_caches(rig, has_begun=num_steps > 0)
        poison_all(rig)
        num_steps += 1

    poison_all(poisoned)
    with monkeypatch.context() as patching:
        patching.setattr(Level, "crop", crop_and_poison)
        tokens = poisoned.run(check_and_poison)
    assert tokens == clean.run()
    ours, theirs = ([level.as_dict() for level in rig.stats.levels] for rig in (poisoned, clean))
    assert ours == theirs
    assert min(num_steps, num_crops) >= 3
    if ours:
        assert ours[-1]["num_accepted_tokens"] > 0
