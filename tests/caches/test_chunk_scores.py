"""How the retrieval policy scores chunks of the full cache."""

from __future__ import annotations

import torch

from minitri.caches.policies import NEIGHBOR, attention_received, make_policy
from tests.conftest import new_cache, tiny_config


def test_a_chunk_that_is_looked_for_brings_the_next_one_along():
    """A number across a border of chunks: the query finds where it begins, and needs its end one
    token later."""
    full = new_cache(tiny_config(), capacity=48)
    full.keys.normal_(generator=torch.Generator().manual_seed(0))
    full.advance([42])
    query_KGD = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(1))
    full.keys[0, 0, :, 12:16] = 3 * query_KGD.mean(1, keepdim=True)
    policy = make_policy("retrieval", full, 4)
    policy.observe(full, 0, torch.empty(2, 1, 4, 8), 42)
    scores_KN = policy.scores(0, 0, query_KGD, full.keys[0, 0, :, :42])
    plain_KN = attention_received(query_KGD, full.keys[0, 0, :, :40].unflatten(1, (10, 4)).mean(2))
    assert scores_KN.shape == (2, 10)
    assert plain_KN.argmax(1).tolist() == [3, 3]
    assert all(set(best) == {3, 4} for best in scores_KN.topk(2).indices.tolist())
    assert torch.equal(scores_KN[:, 0], plain_KN[:, 0])
    assert torch.equal(
        scores_KN[:, 1:], torch.maximum(plain_KN[:, 1:], NEIGHBOR * plain_KN[:, :-1])
    )
