"""Whole runs with trees: greedy and coupled texts equal autoregressive ones, wherever the KV is."""

import pytest

from tests.cascades import WARM, Rig, near_copy, random_prompt
from tests.conftest import tiny_config, tiny_model

CONFIG = tiny_config(num_layers=3)
PROMPTS = [random_prompt(CONFIG, n, seed=n) for n in (60, 1, 21)]
SMALL = {"budget": 16, "chunk_size": 4, "num_recent_tokens": 6, "rebuild_stride": 9}


@pytest.mark.slow
def test_a_tree_leads_further_than_a_chain_of_its_depth():
    """Over four seeds: 2.2 tokens a step, 2.4 and 2.6."""
    target = tiny_model(CONFIG)

    def tokens_per_step(**settings):
        levels = []
        for seed in range(4):
            rig = Rig(
                target,
                PROMPTS,
                draft=near_copy(target, 0.05),
                method="naive",
                sampling=WARM,
                num_new=80,
                num_recent_tokens=40,
                seed=10 * seed,
                **settings,
            )
            rig.run()
            levels.append(rig.stats.levels[-1])
        accepted = sum(level.num_accepted_tokens for level in levels)
        return 1 + accepted / sum(level.num_rounds for level in levels)

    chain = tokens_per_step(gamma1=3, verification="token")  # as trees are
    assert chain < 0.97 * tokens_per_step(tree="4x3")
    assert chain < 0.93 * tokens_per_step(gamma1=3, tree="12")
