"""The kernel of verification against its definition, on several instruction sets."""

import itertools
import math
from functools import partial

import pytest
import torch

from minitri.core.decoding.verification import Proposal, decide, verify, verify_block

every_rule = pytest.mark.parametrize("rule", [verify, verify_block])


def distributions(*shape, seed, least=-0.5, ties=8):
    """Random distributions with zeros, and with numbers that are equal."""
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn(*shape, generator=generator) * ties).round() / ties
    best = scores == scores.amax(-1, keepdim=True)  # of which one is kept even so
    return scores.where((scores > least) | best, -math.inf).softmax(-1)


def case(counts, V, seed, **options):
    """Guesses sampled from q, which is near p; in row 1 q is one-hot."""
    B, N = len(counts), max(counts)
    p_BNV = distributions(B, N + 1, V, seed=seed, **options)
    q_BNV = (p_BNV + distributions(B, N + 1, V, seed=seed + 1000, **options))[:, :N] / 2
    generator = torch.Generator().manual_seed(seed)
    tokens = [
        torch.multinomial(q_NV, 1, generator=generator).flatten().tolist() if n else []
        for q_NV, n in zip((q_BNV[b, :n] for b, n in enumerate(counts)), counts, strict=True)
    ]
    if B > 1:
        n = counts[1]
        q_BNV[1, :n] = 0
        q_BNV[1, range(n), tokens[1]] = 1
    proposal = Proposal.of(tokens, q_BNV, "draft")
    return proposal, p_BNV, torch.rand(B, N + 1, dtype=torch.float64, generator=generator)


def check(kernels, rule, *given):
    """Asserts that the kernel emits the tokens that the rule does by its definition."""
    found = decide(partial(kernels.verify, rule=rule), *given)
    assert found == decide(rule, *given)
    return found


@every_rule
@pytest.mark.parametrize("V", [1, 2, 50, 4001])
def test_verdicts_are_those_of_the_definition(kernels, rule, V):
    """Rows have uneven numbers of guesses, those of one are certain. Numbers may be at the edge,
    distributions one-hot, as those of greedy decoding, or without zeros."""
    lengths = set()
    kinds = itertools.product((-0.5, -math.inf, 99.0), (None, 0.0, 1 - 2**-53))
    for seed, (least, edge) in itertools.product(range(10), kinds):
        proposal, p_BNV, uniforms_BN = case([4, 2, 0, 1, 6], V, seed, least=least)
        if edge is not None:
            uniforms_BN.fill_(edge)
        lengths |= {len(tokens) for tokens in check(kernels, rule, proposal, p_BNV, uniforms_BN)}
    assert V == 1 or lengths > {1, 2, 3}


@every_rule
def test_a_residual_that_vanishes_falls_back_to_p(kernels, rule):
    p_BNV = distributions(1, 4, 50, seed=0)
    proposal = Proposal.of([[7, 7, 7]], p_BNV[:, :3].contiguous(), "draft")
    for last in (0.0, 0.3, 1 - 2**-53):
        for test in (0.0, 1 - 2**-53, 1.0):  # 1 fails every test
            numbers = torch.tensor([[test] * 3 + [last]], dtype=torch.float64)
            check(kernels, rule, proposal, p_BNV, numbers)


@every_rule
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_end_their_row_alone(kernels, rule, bad):
    """Wherever they are in p or q, except in what pads a row."""
    for place, V in itertools.product((0, 1, 3), (17, 4000)):
        for token in (0, V // 2, V - 1):
            given = case([3, 3, 1], V, seed=place)
            proposal, p_BNV, _ = given
            p_BNV[0, place, token] = bad
            proposal.probs_BNV[1, min(place, 2), token] = bad
            p_BNV[2, 2:], proposal.probs_BNV[2, 1:] = bad, bad
            first, second, third = check(kernels, rule, *given)
            assert (first, second) == ([], []) != third
