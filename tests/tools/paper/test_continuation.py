"""Guesses of any cache, window or model are held against one continuation, without noise."""

import itertools
import math

import pytest
import torch

from minitri import SamplingParams, SpeculationConfig
from minitri.core.decoding.sampling import probs_of_rows
from tests.core.rigs import fresh_read
from tools.paper.baselines.bounds import TopAttention
from tools.paper.baselines.policies import NAMES, speculation_with
from tools.paper.continuation import Continuation, expected_rate

WARM = SamplingParams(0.6, top_p=0.9)
GAMMA, LENGTH, NEW = 3, 200, 24


@pytest.fixture(scope="module")
def said(engine, long_text) -> Continuation:
    prompt = engine.tokenizer.encode(long_text[3000:9000])[:LENGTH]
    return Continuation(engine, prompt, WARM, NEW)


@pytest.mark.parametrize(
    ("policy", "chunk_size"), [*((name, 8) for name in NAMES), ("retrieval", 1), ("retrieval", 32)]
)
def test_a_cache_of_the_whole_text_is_always_accepted_and_a_part_is_not(said, policy, chunk_size):
    def rate(budget: int) -> float:
        settings = {"gamma2": GAMMA, "budget": budget, "chunk_size": chunk_size}
        speculation = speculation_with(policy, SpeculationConfig("retrieval", **settings))
        return said.rate(*said.by_cache(speculation, GAMMA, said.model), GAMMA).mean

    assert rate(256) == pytest.approx(1, abs=1e-4)
    assert 0 < rate(32) < 0.99


@pytest.mark.parametrize("width", [20, 1000])
def test_a_sliding_window_is_read_anew_from_position_0_for_every_guess(said, width):
    """Each guess is the drafter's after those tokens alone, as many as the prompt has at most."""
    guessed_NV = said.by_window(said.model, width)
    assert len(guessed_NV) == NEW
    for number in (1, 7, NEW - 1):
        window = said.tokens[: LENGTH + number][-min(width, LENGTH) :]
        [wanted_V] = probs_of_rows(fresh_read(said.model, window)[1][-1:, None], [WARM])[0]
        torch.testing.assert_close(guessed_NV[number], wanted_V, atol=1e-5, rtol=1e-4)


def test_attention_to_the_best_tokens_is_that_of_plain_loops():
    """Two of the block's three tokens may not see what comes after them."""
    T, H, K, D, prefix, budget = 3, 4, 2, 8, 20, 5
    generator = torch.Generator().manual_seed(0)
    q_BTHD = torch.randn(1, T, H, D, generator=generator)
    keys_BKSD, values_BKSD = torch.randn(2, 1, K, 40, D, generator=generator)
    attended_BTHD = TopAttention(budget)(q_BTHD, keys_BKSD, values_BKSD, [prefix])
    for t, h in itertools.product(range(T), range(H)):
        seen = (0, h // 2, slice(prefix + t + 1))
        scores_S = keys_BKSD[seen] @ q_BTHD[0, t, h] / math.sqrt(D)
        best = scores_S.argsort(descending=True)[:budget]
        wanted_D = scores_S[best].softmax(0) @ values_BKSD[seen][best]
        torch.testing.assert_close(attended_BTHD[0, t, h], wanted_D)


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
