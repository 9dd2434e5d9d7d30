"""Guesses of any cache, window or model are held against one continuation, without noise."""

import dataclasses
import math

import pytest
import torch

from minitri import SamplingParams, SpeculationConfig
from minitri.core.decoding.sampling import probs_of_rows
from minitri.core.model.block import read_block
from tests.core.rigs import new_cache
from tools.paper.baselines.bounds import TopAttention, first_layers_whole
from tools.paper.baselines.policies import NAMES, speculation_with
from tools.paper.continuation import Continuation, expected_rate

WARM = SamplingParams(0.6, top_p=0.9)
GAMMA, LENGTH, NEW = 3, 200, 24


@pytest.fixture(scope="module")
def said(engine, long_text) -> Continuation:
    prompt = engine.tokenizer.encode(long_text[3000:9000])[:LENGTH]
    return Continuation(engine, prompt, WARM, NEW)


def settings(budget: int) -> SpeculationConfig:
    return SpeculationConfig("retrieval", gamma2=GAMMA, budget=budget)


@pytest.mark.parametrize(
    ("policy", "chunk_size"), [*((name, 8) for name in NAMES), ("retrieval", 1), ("retrieval", 32)]
)
def test_a_cache_of_the_whole_text_is_always_accepted_and_a_part_is_not(said, policy, chunk_size):
    def rate(budget: int) -> float:
        chunked = dataclasses.replace(settings(budget), chunk_size=chunk_size)
        speculation = speculation_with(policy, chunked)
        return said.rate(*said.by_cache(speculation, GAMMA, said.model), GAMMA).mean

    assert rate(256) == pytest.approx(1, abs=1e-4)
    assert 0 < rate(32) < 0.99


def test_a_drafter_that_is_the_target_is_always_accepted_within_its_window(said):
    wide, narrow = (said.rate(said.by_drafter(said.model, GAMMA, n), GAMMA).mean for n in (230, 20))
    assert wide == pytest.approx(1, abs=1e-4)
    assert narrow < 0.99


@pytest.mark.parametrize("width", [20, 1000])
def test_a_sliding_window_is_read_anew_from_position_0_for_every_guess(said, width):
    """Each guess is the drafter's after those tokens alone, as many as the prompt has at most."""
    found_NV = said.by_window(said.model, width)
    assert torch.equal(found_NV[0], said.probs_NV[0])
    assert len(found_NV) == NEW
    for number in (1, 7, NEW - 1):
        window = said.tokens[: LENGTH + number][-min(width, LENGTH) :]
        hidden_1TE = read_block(said.model, [window], new_cache(said.model.config, 1, len(window)))
        [[wanted_V]] = probs_of_rows(said.model.logits(hidden_1TE[:, -1:]), [WARM])
        torch.testing.assert_close(found_NV[number], wanted_V, atol=1e-5, rtol=1e-4)


def test_first_layers_that_are_whole_see_everything_and_no_others_do(said):
    """With all layers whole nothing is missing; with none the model is the plain one."""
    models = [first_layers_whole(said.model, said.full, count) for count in (0, 1, 2)]
    none, one, all_layers = said.by_cache(settings(32), GAMMA, *models)
    [plain] = said.by_cache(settings(32), GAMMA, said.model)
    torch.testing.assert_close(none, plain, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(all_layers, said.probs_NV[: len(plain)], atol=1e-5, rtol=1e-4)
    assert said.rate(none, GAMMA).mean < said.rate(one, GAMMA).mean < 1


def test_queries_that_choose_for_themselves_are_the_bound(said):
    """The full cache is as it was; few tokens do better than those that were chosen once."""
    keys = said.full.keys[..., : LENGTH + NEW - 1, :].clone()
    everything = said.by_top_tokens(1000, GAMMA)
    torch.testing.assert_close(everything, said.probs_NV[: len(everything)], atol=1e-5, rtol=1e-4)
    few, fewer, one_layer = (
        said.rate(said.by_top_tokens(budget, GAMMA, num_whole), GAMMA).mean
        for budget, num_whole in ((32, 0), (4, 0), (4, 1))
    )
    [once_NV] = said.by_cache(speculation_with("topk", settings(32)), GAMMA, said.model)
    once = said.rate(once_NV, GAMMA).mean
    assert once < few < 1
    assert fewer < min(few, one_layer)
    assert torch.equal(keys, said.full.keys[..., : LENGTH + NEW - 1, :])


def test_attention_to_the_best_tokens_is_that_of_the_books():
    """By plain loops; two of the block's three tokens may not see what comes after them."""
    T, H, K, D, prefix, budget = 3, 4, 2, 8, 20, 5
    generator = torch.Generator().manual_seed(0)
    q_BTHD, keys_BKSD, values_BKSD = (
        torch.randn(shape, generator=generator)
        for shape in ((1, T, H, D), (1, K, 40, D), (1, K, 40, D))
    )
    found_BTHD = TopAttention(budget)(q_BTHD, keys_BKSD, values_BKSD, [prefix])
    for t in range(T):
        for h in range(H):
            keys_SD, values_SD = (
                it[0, h // 2, : prefix + t + 1] for it in (keys_BKSD, values_BKSD)
            )
            scores_S = keys_SD @ q_BTHD[0, t, h] / math.sqrt(D)
            best = scores_S.argsort(descending=True)[:budget]
            wanted_D = scores_S[best].softmax(0) @ values_SD[best]
            torch.testing.assert_close(found_BTHD[0, t, h], wanted_D)


def test_a_rate_does_not_depend_on_what_was_measured_before(said):
    """Models share a cache, policies the full one; and the prompt can be continued otherwise."""
    [first] = said.by_cache(settings(32), GAMMA, said.model)
    twice = said.by_cache(settings(32), GAMMA, said.model, said.model)
    assert torch.equal(first, twice[0])
    assert torch.equal(first, twice[1])
    tokens = list(said.tokens)
    said.say(SamplingParams(), NEW, 0)
    assert said.tokens != tokens
    assert said.probs_NV.max(1).values.eq(1).all()
    said.say(WARM, NEW, 0)
    assert said.tokens == tokens
    torch.testing.assert_close(*said.by_cache(settings(32), GAMMA, said.model), first)


def test_the_expected_rate_is_that_of_many_draws_and_counts_a_last_block_that_is_cut():
    """Rows 1 and 2, row 4: with overlaps a, b, c, tested are 1 + a and 1 guesses."""
    overlaps = [0.9, 0.5, 0.25]  # of rows 1, 2, 4; row 3 is the token that the verifier adds
    rows = [1.0, *overlaps[:2], 0.1, overlaps[2]]
    probs_NV = torch.tensor([[it, 1 - it, 0] for it in rows])
    verifier_NV = torch.tensor([[1.0, 0, 0]] * 5)
    rate = expected_rate(probs_NV, verifier_NV, 2)
    a, b, c = overlaps
    assert rate.mean == pytest.approx((a + a * b + c) / (1 + a + 1))
    assert rate.error > 0


def test_attention_is_that_of_the_books_and_leaves_new_tokens_out(said):
    config = said.model.config
    first, count, layer, head = 3, 2, 1, 3
    found_QS = said.attention(layer, first, count)[head]
    assert found_QS.shape == (count, LENGTH)
    kv_head = head // (config.num_heads // config.num_kv_heads)
    for number in range(count):
        query_D = said.queries_LNHD[layer, first + number, head]
        keys_SD = said.full.keys[layer, 0, kv_head, :LENGTH]
        wanted_S = (keys_SD @ query_D / math.sqrt(config.head_dim)).softmax(0)
        torch.testing.assert_close(found_QS[number], wanted_S)


def test_what_is_accepted_less_the_more_it_differs(said):
    """Against itself a distribution has rate 1, against one that shares no token 0."""
    other_NV = torch.zeros_like(said.probs_NV).scatter_(1, said.probs_NV.argmin(1, True), 1)
    assert said.rate(said.probs_NV, GAMMA).mean == pytest.approx(1)
    assert said.rate(other_NV, GAMMA).mean == pytest.approx(0, abs=1e-6)
