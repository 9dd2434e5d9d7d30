"""H2O evicts for good while the prompt is read, as published."""

import math

import pytest
import torch

from tests.core.rigs import new_cache, tiny_config
from tools.paper.baselines.policies import QUERIES_AT_ONCE, HeavyHitters

CONFIG = tiny_config()
L, K, H, D = CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.num_heads, CONFIG.head_dim
PIECES = [40, 1, 99, 3, 64, 93]
LENGTH = sum(PIECES)


@pytest.mark.parametrize("budget", [16, 100, None])
@pytest.mark.parametrize(("layer", "k"), [(0, 0), (L - 1, K - 1)])
def test_kept_tokens_are_those_with_most_attention_from_queries_that_saw_them(budget, layer, k):
    """By plain loops: after every block the older tokens with least attention go for good, and
    later queries attend to what is left alone. Half of the budget is for the latest tokens."""
    generator = torch.Generator().manual_seed(0)
    full = new_cache(CONFIG, 1, LENGTH)
    full.keys.copy_(torch.randn(full.shape, generator=generator))
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
