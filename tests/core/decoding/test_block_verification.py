"""Block verification; its distribution is enumerated in `test_enumeration.py`."""

import pytest
import torch

from minitri.core.decoding.verification import Proposal, decide, verify_block


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
