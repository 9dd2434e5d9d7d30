"""Whole runs with trees: greedy and coupled texts equal autoregressive ones, wherever the KV is."""

from __future__ import annotations

import pytest
import torch

from minitri.gpu.offload.offloaded_cache import OffloadedFullCache
from minitri.gpu.streams import Streams
from tests.cascades import GREEDY, WARM, Rig, near_copy, plain_tokens, random_prompt
from tests.conftest import CPU, tiny_config, tiny_model

CONFIG = tiny_config(num_layers=3)
PROMPTS = [random_prompt(CONFIG, n, seed=n) for n in (60, 1, 21)]
SMALL = {"budget": 16, "chunk_size": 4, "num_recent_tokens": 6, "rebuild_stride": 9}
STACKS = [
    (method, tree)
    for method in ("naive", "triforce")
    for tree in ("1", "7", "20", "3x2", "8x1", "1x4")
] + [("retrieval", "7"), ("auto", "20"), ("auto", "3x2")]


@pytest.mark.parametrize(("sampling", "coupled"), [(GREEDY, False), (GREEDY, True), (WARM, True)])
@pytest.mark.parametrize(("method", "tree"), STACKS)
def test_greedy_and_coupled_texts_are_autoregressive_ones(method, tree, sampling, coupled):
    target = tiny_model(CONFIG)
    settings = {"sampling": sampling, "coupled": coupled, **SMALL}
    rig = Rig(
        target,
        PROMPTS,
        draft=near_copy(target, 0.02),
        method=method,
        tree=tree,
        gamma2=4,
        **settings,
    )
    assert rig.run() == plain_tokens(target, PROMPTS, **settings)


@pytest.mark.parametrize("method", ["naive", "triforce"])
@pytest.mark.parametrize("on_chip", [0, 1, 2])
def test_a_path_in_host_memory_is_moved_together_too(on_chip, method):
    target = tiny_model(CONFIG)
    full = OffloadedFullCache.placed(
        CONFIG, 3, 512, on_chip=on_chip, dtype=torch.float32, device=CPU, streams=Streams()
    )
    settings = {"sampling": WARM, "coupled": True, **SMALL}
    rig = Rig(
        target,
        PROMPTS,
        draft=near_copy(target, 0.05),
        method=method,
        tree="9",
        full=full,
        **settings,
    )
    assert rig.run() == plain_tokens(target, PROMPTS, **settings)
    assert rig.stats.levels[-1].num_accepted_tokens > 10


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
