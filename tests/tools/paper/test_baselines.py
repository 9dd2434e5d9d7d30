"""The paper's baselines as plug-ins: H2O, which evicts for good while the prompt is read, as
published; and how guesses of a cache are held against one continuation."""

import math

import pytest
import torch

from minitri import SamplingParams, SpeculationConfig
from tests.core.rigs import new_cache, tiny_config
from tools.paper.baselines.policies import POLICIES, QUERIES_AT_ONCE, HeavyHitters, speculation_with
from tools.paper.continuation import Continuation, expected_rate

CONFIG = tiny_config()
L, K, H, D = CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.num_heads, CONFIG.head_dim
PIECES = [40, 1, 99, 3, 64, 93]
LENGTH = sum(PIECES)


@pytest.mark.parametrize("budget", [16, 100, None])
@pytest.mark.parametrize(("layer", "k"), [(0, 0), (L - 1, K - 1)])
def test_kept_tokens_are_those_with_most_attention_from_queries_that_saw_them(budget, layer, k):
    """Plain loops say: after every block the older tokens with least attention go for good, and
    later queries attend to what is left alone. Half of the budget is for the latest tokens."""
    generator = torch.Generator().manual_seed(0)
    full = new_cache(CONFIG, 1, LENGTH)
    full.keys.copy_(torch.randn(full.keys.shape, generator=generator))
    queries_LTHD = torch.randn(L, LENGTH, H, D, generator=generator) * 3
    policy = HeavyHitters(budget)
    received: dict[int, float] = {}
    end = 0
    for count in PIECES:
        start, end = end, end + count
        policy.observe(full, 0, queries_LTHD[:, start:end], end)
        for t in range(start, end):
            received[t] = 0.0
            keys_PD = full.keys[layer, 0, k, [*received]]
            for query_D in queries_LTHD[layer, t, k * H // K : (k + 1) * H // K]:
                weights = (keys_PD @ query_D / math.sqrt(D)).softmax(0).tolist()
                received = {p: received[p] + w for p, w in zip(received, weights, strict=True)}
            is_last = t == end - 1 or (t - start + 1) % QUERIES_AT_ONCE == 0
            if is_last and budget is not None and len(received) > budget:
                older = [*received][: len(received) - budget // 2]
                for place in sorted(older, key=received.__getitem__)[: len(received) - budget]:
                    del received[place]
        chunks_KNMD = full.keys[layer, 0, :, :end].unsqueeze(2)
        scores = policy.scores(layer, 0, torch.empty(K, 1, D), chunks_KNMD)[k].tolist()
        kept = {place: score for place, score in enumerate(scores) if score > -math.inf}
        assert kept == pytest.approx(received, rel=1e-4)


WARM = SamplingParams(0.6, top_p=0.9)
GAMMA, NUM_READ, NEW = 3, 200, 24


@pytest.fixture(scope="module")
def said(engine, long_text) -> Continuation:
    prompt = engine.tokenizer.encode(long_text[3000:9000])[:NUM_READ]
    return Continuation(engine, prompt, WARM, NEW)


@pytest.mark.parametrize(
    ("policy", "chunk_size"),
    [*((name, 8) for name in ("retrieval", *POLICIES)), ("retrieval", 1), ("retrieval", 32)],
)
def test_a_cache_of_the_whole_text_is_always_accepted_and_a_part_is_not(said, policy, chunk_size):
    def rate(budget: int) -> float:
        settings = {"gamma2": GAMMA, "budget": budget, "chunk_size": chunk_size}
        speculation = speculation_with(policy, SpeculationConfig("retrieval", **settings))
        return said.rate(*said.by_cache(speculation, GAMMA, said.model), GAMMA).mean

    assert rate(256) == pytest.approx(1, abs=1e-4)
    assert 0 < rate(32) < 0.99


def test_the_expected_rate_is_that_of_many_draws_and_counts_a_last_block_that_is_cut():
    """Rows 1 and 2, row 4: with overlaps a, b, c, tested are 1 + a and 1 guesses."""
    overlaps = [0.9, 0.5, 0.25]  # of rows 1, 2, 4; row 3 is the token that the verifier adds
    rows = [1.0, *overlaps[:2], 0.1, overlaps[2]]
    probs_NV = torch.tensor([[p, 1 - p, 0] for p in rows])
    verifier_NV = torch.tensor([[1.0, 0, 0]] * 5)
    rate = expected_rate(probs_NV, verifier_NV, 2)
    a, b, c = overlaps
    assert rate.mean == pytest.approx((a + a * b + c) / (1 + a + 1))
    assert rate.error > 0
