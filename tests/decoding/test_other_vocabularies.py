"""Drafters whose vocabulary is smaller or larger than the target's, with independent randomness.

Greedy and coupled runs cannot see a wrong q, so whole texts are counted: chi-square as in
`test_joint_distribution.py`, 4,000 seeds per case. A distribution that is 9 % away (total
variation) is found with odds of 99 %, a false alarm has odds of 1 in 100,000.
"""

import dataclasses
import itertools

import pytest
import torch

from minitri import SamplingParams, SpeculationConfig
from minitri.gpu.graphs import GraphPool
from minitri.model.llama import Llama
from minitri.runner import ModelRunner
from tests.chi_square import (
    FALSE_ALARM,
    PROMPT,
    SMALL,
    V,
    costs_that_change,
    count_texts,
    exact_probs,
    other_model,
    p_value,
    smallest_distance,
    target_model,
)
from tests.conftest import CPU, new_cache
from tests.exactness import probs_after
from tests.gpu_twins.conftest import as_on_a_gpu, lengths_on_the_device  # noqa: F401

SAMPLING, NUM_SEEDS = SamplingParams(0.9, top_p=0.97), 4000


def trimmed_model(target: Llama) -> Llama:
    """A drafter with the target's embeddings and a head over two tokens of four."""
    config = dataclasses.replace(target.config, draft_of="target", head_size=2)
    draft = Llama(config, dtype=torch.float32, device=CPU, target=target, attend=target.attend)
    generator = torch.Generator().manual_seed(5)
    for parameter in draft.parameters():
        if parameter is not target.embed_tokens and parameter.is_floating_point():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    draft.lm_head.token_ids.copy_(torch.tensor([2, 0]))
    return draft.eval()


DRAFTERS = {
    "half of the tokens": lambda target: other_model(V // 2),
    "three times as many": lambda target: other_model(3 * V),
    "trimmed head": trimmed_model,
    "n-grams": lambda target: None,
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["naive", "triforce", "auto"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_texts_follow_the_targets_distribution(drafter, method, monkeypatch):
    """`auto` takes all methods in turns, the one without a drafter included."""
    monkeypatch.setattr("minitri.stack.prior_seconds", costs_that_change)
    target = target_model()
    probs = exact_probs(target, SAMPLING)
    assert smallest_distance(probs, NUM_SEEDS) < 0.09
    speculation = SpeculationConfig(method, gamma1=2, gamma2=2, **SMALL)
    draft = DRAFTERS[drafter](target)
    counts, runs = count_texts(target, draft, SAMPLING, speculation, NUM_SEEDS)
    assert p_value(counts.sum(0), probs) > FALSE_ALARM
    assert sum(run.stages[1].num_accepted_tokens for run in runs) > 100  # of the drafter's
    plans = {plan for run in runs for plan in run.steps_per_plan}
    assert len(plans) == (4 if method == "auto" else 1)


@pytest.mark.usefixtures("lengths_on_the_device")
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name != "n-grams"])
def test_static_steps_give_the_distributions_of_eager_ones(drafter):
    """As on a GPU: cut before the softmax, padded after it, and 0 where the head lacks a token."""
    draft = as_on_a_gpu(DRAFTERS[drafter](target_model()))
    text = [token % draft.config.vocab_size % V for token in PROMPT]
    found = []
    for graphs in (None, GraphPool(CPU)):
        settings = {"vocab_size": V, "graphs": graphs, "block_sizes": (len(text),)}
        runner = ModelRunner(draft, new_cache(draft.config), SAMPLING, **settings)
        found.append(probs_after(runner, text, 3).clone())
    assert found[0].shape == (1, 4, V)
    assert torch.allclose(found[0], found[1], atol=1e-6)
    assert torch.allclose(found[1].sum(-1), torch.ones(1, 4))
    lacking = {"half of the tokens": [2, 3], "trimmed head": [1, 3]}.get(drafter, [])
    assert all(row[token] == 0 for row, token in itertools.product(found[1][0], lacking))
