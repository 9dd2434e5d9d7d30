"""Block verification: exact at every level, by enumeration; never shorter; safe in float32."""

import itertools

import pytest
import torch

from minitri import End, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.decoding import random_source
from minitri.decoding.verification import Proposal, verify, verify_block
from tests.cascades import tiny_engine
from tests.exactness import (
    PROMPT,
    Table,
    outcomes,
    outcomes_of_block,
    output_distribution,
    target_distribution,
    toy_cascade,
)


def largest_error(V, gamma1, gamma2=0, *, seed=0, horizon=3, num_steps=1):
    target = Table(V, seed)
    middle = Table(V, seed + 1, near=target) if gamma2 else None
    draft = Table(V, seed + 2, near=target)

    def build(source, batch_size):
        return toy_cascade(source, batch_size, target, middle, draft, gamma1, gamma2)

    options = {"num_steps": num_steps, "decide": verify_block}
    probs = output_distribution(build, horizon, target, **options)
    return float((probs - target_distribution(target, horizon)).abs().max())


@pytest.mark.parametrize("seed", [0, 10])
@pytest.mark.parametrize(("V", "gamma1"), [(3, 1), (4, 2), (3, 4)])
def test_a_block_gives_the_target_distribution(V, gamma1, seed):
    assert largest_error(V, gamma1, seed=seed, horizon=4) < 1e-12


@pytest.mark.parametrize(
    ("V", "gamma1", "gamma2", "horizon"),
    [(3, 1, 1, 3), (3, 2, 1, 4), (3, 2, 2, 5), (4, 2, 2, 3), (3, 3, 1, 4)],
)
def test_blocks_at_both_levels_give_the_target_distribution(V, gamma1, gamma2, horizon):
    """What the inner level proposes is as long as its guesses let it be, and yet every token of it
    follows the rows that are stated for it."""
    assert largest_error(V, gamma1, gamma2, horizon=horizon) < 1e-12


@pytest.mark.slow
def test_nothing_leaks_from_one_block_into_the_next():
    assert largest_error(3, 3, horizon=5, num_steps=2) < 1e-12
    assert largest_error(3, 1, 1, num_steps=2) < 1e-12


def test_a_block_accepts_at_least_as_much_after_every_start():
    """Whatever the guesses: that at least i of them stay is at least as likely. Over all it is
    strictly more."""
    target = Table(3, 0)
    draft, total = Table(3, 2, near=target), [0.0, 0.0]
    for tokens in itertools.product(range(3), repeat=3):
        prefixes = [(*PROMPT, *tokens[:i]) for i in range(4)]
        q_NV = torch.stack([draft.row(prefix) for prefix in prefixes[:3]])
        share = float(q_NV[range(3), tokens].prod())
        if share == 0:
            continue
        p_BNV = torch.stack([target.row(prefix) for prefix in prefixes]).unsqueeze(0)
        proposal = Proposal.of([[*tokens]], q_NV.unsqueeze(0), [["draft"] * 3])
        for number, (decide, cases) in enumerate(
            ((verify, outcomes), (verify_block, outcomes_of_block))
        ):
            for weight, numbers in cases(proposal, p_BNV, 0):
                uniforms_BN = torch.tensor([numbers], dtype=torch.float64)
                verdict = decide(proposal, p_BNV, uniforms_BN)
                total[number] += share * weight * verdict.num_accepted[0]
    assert total[1] > total[0] + 0.01


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
        verdict = verify_block(
            proposal, p_BNV, uniforms_BN if edge is None else torch.full_like(uniforms_BN, edge)
        )
        for b, n in enumerate(verdict.num_accepted):
            emitted = [*proposal.tokens[b][:n], verdict.next_tokens[b]]
            assert all(p_BNV[b, i, token] > 0 for i, token in enumerate(emitted))


@pytest.mark.parametrize("padding", [torch.nan, 0.1])
def test_a_row_does_not_depend_on_its_neighbours_nor_on_what_pads_it(padding):
    counts = [4, 0, 2, 1, 3]
    for seed in range(20):
        proposal, p_BNV, uniforms_BN = random_case(counts, seed)
        for b, n in enumerate(counts):
            proposal.probs_BNV[b, n:] = padding
        together = verify_block(proposal, p_BNV, uniforms_BN)
        for b, n in enumerate(counts):
            own = Proposal.of(proposal.tokens[b : b + 1], proposal.probs_BNV[b : b + 1, :n], [[]])
            numbers = torch.cat((uniforms_BN[b : b + 1, :n], uniforms_BN[b : b + 1, -1:]), 1)
            alone = verify_block(own, p_BNV[b : b + 1, : n + 1], numbers)
            pair = together.num_accepted[b], together.next_tokens[b]
            assert (alone.num_accepted[0], alone.next_tokens[0]) == pair


def test_equal_distributions_accept_everything_and_a_vanished_residual_falls_back_to_p():
    p_BNV = torch.full((1, 4, 4), 0.25)
    proposal = Proposal.of([[2, 0, 1]], p_BNV[:, :3], [["draft"] * 3])
    numbers = torch.tensor([[1 - 2**-53] * 3 + [0.6]], dtype=torch.float64)
    assert verify_block(proposal, p_BNV, numbers).num_accepted == [3]
    numbers[0, :3] = 1.0  # by force
    verdict = verify_block(proposal, p_BNV, numbers)
    assert (verdict.num_accepted, verdict.next_tokens) == ([0], [2])


def tokens_of(verification, temperature, *, coupled):
    speculation = SpeculationConfig(
        "triforce",
        gamma1=2,
        gamma2=3,
        budget=24,
        num_recent_tokens=20,
        coupled=coupled,
        verification=verification,
    )
    events = tiny_engine().generate(
        [[5, 6, 7, 8] * 10, [9, 10, 11]],
        sampling=SamplingParams(temperature),
        seed=[0, 1],
        generation=GenerationConfig(40, ignore_eos=True),
        speculation=speculation,
    )
    return {event.row: event.token_ids for event in events if isinstance(event, End)}


def test_runs_verify_by_block_when_asked(monkeypatch):
    sizes = []

    def watched(proposal, probs_BNV, uniforms_BN):
        sizes.append(max(proposal.counts))
        return verify_block(proposal, probs_BNV, uniforms_BN)

    monkeypatch.setattr(random_source, "verify_block", watched)
    monkeypatch.delattr(random_source, "verify")
    tokens_of("block", 0.9, coupled=False)
    assert {0, 2}.issubset(sizes)  # of the drafter and the retrieval level
    assert max(sizes) >= 3  # of the target
