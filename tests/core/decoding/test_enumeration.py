"""The output distribution of the real cascade, summed over every random number of every level."""

import itertools

import pytest
import torch

from minitri.core.decoding.verification import Proposal, decide, verify, verify_block
from minitri.core.settings import StepPlan
from tests.core.exactness import largest_error

ROUNDING = 1e-12


@pytest.mark.parametrize(
    "sizes",
    [(3, 1, 1), (3, 1, 2), (3, 2, 1), (4, 1, 2), (4, 2, 1), (4, 0, 2), (4, 2, 0), (4, 0, 0)],
)
def test_any_stages_give_the_target_distribution(sizes):
    assert largest_error(*sizes) < ROUNDING


def test_nothing_leaks_from_one_step_into_the_next():
    """What the stages remember of the first is just what the target let stand."""
    assert largest_error(2, 1, 1, num_steps=2) < ROUNDING


PLANS = StepPlan("autoregressive"), StepPlan("naive", 1), StepPlan("triforce", 1, 1)


@pytest.mark.parametrize("plans", itertools.permutations(PLANS))
def test_a_schedule_of_switches_gives_the_target_distribution(plans):
    """The stages are stacked again before each of two steps."""
    assert largest_error(3, 1, 1, num_steps=2, plans=plans) < ROUNDING


@pytest.mark.parametrize(
    ("V", "gamma1", "gamma2", "horizon"),
    [(4, 2, 0, 4), (3, 4, 0, 4), (3, 1, 1, 3), (3, 2, 1, 4), (3, 2, 2, 3), (3, 3, 1, 4)],
)
def test_blocks_give_the_target_distribution(V, gamma1, gamma2, horizon):
    """Every token of the inner level follows the rows that are stated for it."""
    assert largest_error(V, gamma1, gamma2, horizon=horizon, rule=verify_block) < ROUNDING


@pytest.mark.slow
def test_nothing_leaks_from_one_block_into_the_next():
    assert largest_error(3, 3, 0, horizon=5, num_steps=2, rule=verify_block) < ROUNDING
    assert largest_error(3, 1, 1, num_steps=2, rule=verify_block) < ROUNDING


@pytest.mark.parametrize("rule", [verify, verify_block])
def test_equal_distributions_accept_everything_and_a_vanished_residual_falls_back_to_p(rule):
    p_BNV = torch.full((1, 4, 4), 0.25)
    proposal = Proposal.of([[2, 0, 1]], p_BNV[:, :3], [["draft"] * 3])
    numbers = torch.tensor([[1 - 2**-53] * 3 + [0.6]], dtype=torch.float64)
    assert decide(rule, proposal, p_BNV, numbers) == [[2, 0, 1, 2]]
    numbers[0, :3] = 1.0  # by force
    assert decide(rule, proposal, p_BNV, numbers) == [[2]]


def random_case(counts, seed):
    """Filtered distributions and guesses sampled from q."""
    generator, B, N = torch.Generator().manual_seed(seed), len(counts), max(counts)
    noise = torch.randn(2, B, N + 1, 12, generator=generator)
    p_BNV, q_BNV = (scores.where(scores > -0.5, -torch.inf).softmax(-1) for scores in noise)
    q_BNV = (p_BNV / 2 + q_BNV / 2)[:, :N]
    tokens = torch.multinomial(q_BNV.flatten(0, 1), 1, generator=generator).view(B, N).tolist()
    tokens = [row[:n] for row, n in zip(tokens, counts, strict=True)]
    uniforms_BN = torch.rand(B, N + 1, dtype=torch.float64, generator=generator)
    return Proposal.of(tokens, q_BNV, tokens), p_BNV, uniforms_BN


@pytest.mark.parametrize("edge", [0.0, None, 1 - 2**-53])
def test_no_token_of_probability_zero_is_emitted(edge):
    for seed in range(100):
        proposal, p_BNV, uniforms_BN = random_case([4] * 8, seed)
        if edge is not None:
            uniforms_BN.fill_(edge)
        for b, tokens in enumerate(decide(verify_block, proposal, p_BNV, uniforms_BN)):
            assert all(p_BNV[b, i, token] > 0 for i, token in enumerate(tokens))


@pytest.mark.parametrize("padding", [torch.nan, 0.1])
def test_a_row_does_not_depend_on_its_neighbours_nor_on_what_pads_it(padding):
    counts = [4, 0, 2, 1, 3]
    for seed in range(20):
        proposal, p_BNV, uniforms_BN = random_case(counts, seed)
        for b, n in enumerate(counts):
            proposal.probs_BNV[b, n:] = padding
        together = decide(verify_block, proposal, p_BNV, uniforms_BN)
        for b, n in enumerate(counts):
            own = Proposal.of(proposal.tokens[b : b + 1], proposal.probs_BNV[b : b + 1, :n], [[]])
            numbers = torch.cat((uniforms_BN[b : b + 1, :n], uniforms_BN[b : b + 1, -1:]), 1)
            assert decide(verify_block, own, p_BNV[b : b + 1, : n + 1], numbers) == [together[b]]
