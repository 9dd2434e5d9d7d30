"""H2O evicts for good while the prompt is read, as published."""

import math

import pytest
import torch

from tests.core.rigs import new_cache, tiny_config
from tools.paper.baselines.policies import QUERIES_AT_ONCE, HeavyHitters

CONFIG = tiny_config()
L, K, H, D = CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.num_heads, CONFIG.head_dim
LENGTH = 300


class Reading:
    """A text of random K, V and queries, read in pieces."""

    def __init__(self, budget: int | None, pieces: list[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.full = new_cache(CONFIG, 1, LENGTH)
        self.full.keys.copy_(torch.randn(self.full.shape, generator=generator))
        self.queries_LTHD = torch.randn(L, LENGTH, H, D, generator=generator) * 3
        self.policy = HeavyHitters(budget)
        self.kept = list[list[set[int]]]()
        """After each piece, by layer and KV head."""
        end = 0
        for count in pieces:
            end += count
            self.policy.observe(self.full, 0, self.queries_LTHD[:, end - count : end], end)
            self.kept.append([set(row) for row in self.places(end)])

    def scores(self, layer: int, end: int) -> torch.Tensor:
        chunks_KNMD = self.full.keys[layer, 0, :, :end].unsqueeze(2)
        return self.policy.scores(layer, 0, torch.empty(K, 1, D), chunks_KNMD)

    def places(self, end: int) -> list[list[int]]:
        """What is not evicted: the tokens with a score."""
        scores = torch.cat([self.scores(layer, end) for layer in range(L)])
        return [row.nonzero().flatten().tolist() for row in scores > -math.inf]

    def attention(self, layer: int, k: int, t: int, places: list[int]) -> torch.Tensor:
        """That token's, of all its queries for a KV head, to these places; in plain words."""
        keys_PD = self.full.keys[layer, 0, k, places]
        heads = range(k * H // K, (k + 1) * H // K)
        queries = (self.queries_LTHD[layer, t, h] for h in heads)
        return sum((keys_PD @ query_D / math.sqrt(D)).softmax(0) for query_D in queries)


@pytest.mark.parametrize("budget", [16, 100])
def test_an_evicted_token_never_comes_back(budget):
    """Whatever the pieces; the budget is full, and half of it are the latest tokens."""
    reading = Reading(budget, [40, 1, 99, 3, 64, 93])
    end = 0
    before = [set[int]() for _ in range(L * K)]
    for count, kept in zip([40, 1, 99, 3, 64, 93], reading.kept, strict=True):
        new = {*range(end, end + count)}
        end += count
        for old, now in zip(before, kept, strict=True):
            assert now <= old | new
            assert len(now) == min(budget, end)
            assert {*range(max(0, end - budget // 2), end)} <= now
        before = kept
    assert len(set(map(frozenset, before))) > 1  # each head has its own


@pytest.mark.parametrize("budget", [None, LENGTH, 2 * LENGTH])
def test_with_room_for_the_whole_text_it_is_attention_accumulated_over_everything(budget):
    reading = Reading(budget, [100, 150, 50])
    for layer, k in ((0, 0), (L - 1, K - 1)):
        total = torch.zeros(LENGTH)
        for t in range(LENGTH):
            total[: t + 1] += reading.attention(layer, k, t, [*range(t + 1)])
        torch.testing.assert_close(reading.scores(layer, LENGTH)[k], total)


def test_later_queries_attend_to_what_is_left_alone():
    """By plain loops: after every block the tokens with least attention among the kept go."""
    budget = 48
    reading = Reading(budget, [LENGTH])
    layer, k = 1, 0
    received: dict[int, float] = {}
    for start in range(0, LENGTH, QUERIES_AT_ONCE):
        for t in range(start, min(start + QUERIES_AT_ONCE, LENGTH)):
            received[t] = 0.0
            places = [*received]
            got = reading.attention(layer, k, t, places)
            received = {it: received[it] + float(x) for it, x in zip(places, got, strict=True)}
        latest = sorted(received)[-(budget // 2) :]
        others = sorted(set(received) - set(latest), key=lambda it: received[it])
        kept = {*latest, *others[-(budget - len(latest)) :]}
        received = {it: x for it, x in received.items() if it in kept}
    assert reading.kept[-1][layer * K + k] == set(received)
    scores = reading.scores(layer, LENGTH)[k]
    for it, x in received.items():
        assert float(scores[it]) == pytest.approx(x, rel=1e-4)
