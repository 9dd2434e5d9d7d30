"""The joint distribution of several tokens through the real engine, by chi-square against the
model's own distributions.

Marginals can be right while the joint is wrong (noise used twice). Seeds are fixed, so the tests
are deterministic; the stated odds are those of a false alarm had the seeds been drawn anew.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import minitri
from minitri import End, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.decoding.sampling import probs_from_logits
from minitri.loading.tokenizer import Tokenizer, TokenizersBackend
from tests.conftest import byte_level_tokenizer, new_cache, tiny_config, tiny_model

V, PROMPT, NUM_TOKENS, NUM_SEEDS, ROWS = 5, [1, 3, 2, 0, 4, 1, 2], 3, 2000, 500


@pytest.fixture(scope="module")
def models():
    """A target and an adversarial drafter: another random model, whose favourites are not the
    target's."""
    return tuple(tiny_model(tiny_config(vocab_size=V), seed=seed) for seed in (0, 9))


def exact_probs(model, sampling) -> torch.Tensor:
    """(V,) * NUM_TOKENS, by the model's own forward passes."""
    sequences = [list(tokens) for tokens in itertools.product(range(V), repeat=NUM_TOKENS - 1)]
    block = torch.tensor([[*PROMPT, *tokens] for tokens in sequences])
    cache = new_cache(model.config, len(sequences))
    hidden = model(block, torch.arange(block.shape[1]).expand_as(block), cache)
    distributions = probs_from_logits(
        model.logits(hidden[:, len(PROMPT) - 1 :]).double().flatten(0, 1), sampling
    )
    distributions = distributions.view(len(sequences), NUM_TOKENS, V)
    distribution = torch.ones((V,) * NUM_TOKENS, dtype=torch.float64)
    for number, tokens in enumerate(sequences):
        for i, token in enumerate(tokens):
            distribution[tuple(tokens)] *= distributions[number, i, token]
        distribution[tuple(tokens)] *= distributions[number, -1]
    return distribution


@pytest.mark.slow
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(0.6, top_p=0.9), SamplingParams(1.0, top_k=4, min_p=0.02)]
)
def test_three_tokens_follow_the_joint_distribution(models, sampling, coupled):
    """Chi-square over all texts of 3 tokens expected at least 5 times; false alarm 1 in 100,000
    (per case)."""
    target, draft = models
    tokenizer = Tokenizer(TokenizersBackend(byte_level_tokenizer()), None)
    engine = minitri.Engine(target, tokenizer, draft)
    speculation = SpeculationConfig(
        "triforce",
        gamma1=2,
        gamma2=2,
        budget=4,
        chunk_size=2,
        num_sink_tokens=1,
        num_recent_tokens=3,
        coupled=coupled,
    )
    counts = torch.zeros((V,) * NUM_TOKENS, dtype=torch.float64)
    for first in range(0, NUM_SEEDS, ROWS):
        run = engine.generate(
            [PROMPT] * ROWS, sampling=sampling, generation=GenerationConfig(NUM_TOKENS),
            speculation=speculation, seed=first,
        )  # fmt: skip
        for event in run:
            if isinstance(event, End):
                counts[event.token_ids] += 1
    distribution = exact_probs(target, sampling)
    assert counts[distribution == 0].sum() == 0
    common = distribution * NUM_SEEDS >= 5
    observed = torch.cat((counts[common], counts[~common].sum().view(1)))
    expected = torch.cat((distribution[common], distribution[~common].sum().view(1))) * NUM_SEEDS
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    p_value = float(
        torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0))
    )
    assert freedom > 20
    assert p_value > 1e-5, (statistic, freedom)
