"""The output distribution of the real cascade, computed exactly by summing over every random number
of every level."""

import pytest
import torch

from minitri.decoding.verification import Proposal, verify
from tests.exactness import (
    BOTH,
    Table,
    cells,
    outcomes,
    output_distribution,
    target_distribution,
    toy_cascade,
)

HORIZON = 3


def largest_error(V, gamma1, gamma2, *, with_middle=True, with_draft=True, seed=0, num_steps=1):
    target = Table(V, seed)
    middle = Table(V, seed + 1, near=target) if with_middle else None
    draft = Table(V, seed + 2, near=target) if with_draft else None

    def build(source, batch_size):
        return toy_cascade(source, batch_size, target, middle, draft, gamma1, gamma2)

    probs = output_distribution(build, HORIZON, target, num_steps=num_steps)
    return float((probs - target_distribution(target, HORIZON)).abs().max())


@pytest.mark.parametrize("gamma2", [1, 2])
@pytest.mark.parametrize("gamma1", [1, 2])
@pytest.mark.parametrize("V", [3, 4])
def test_both_levels_together_give_the_target_distribution(V, gamma1, gamma2, capsys):
    error = largest_error(V, gamma1, gamma2)
    with capsys.disabled():
        print(f"\n  triforce, V={V}, gamma1={gamma1}, gamma2={gamma2}: largest error {error:.1e}")
    assert error < 1e-12


def test_nothing_leaks_from_one_step_into_the_next():
    """Two whole steps: what the stages remember of the first must be just what the target let
    stand."""
    assert largest_error(3, 1, 1, num_steps=2) < 1e-12


@pytest.mark.parametrize(
    ("with_middle", "with_draft"), [(True, False), (False, True), (False, False)]
)
@pytest.mark.parametrize("seed", [10, 20])
def test_fewer_stages_give_the_target_distribution_too(with_middle, with_draft, seed):
    assert largest_error(4, 2, 2, with_middle=with_middle, with_draft=with_draft, seed=seed) < 1e-12


def test_a_single_decision_follows_the_distribution_whatever_the_guesses():
    """Disjoint supports, equal distributions, one-hot ones: the first emitted token follows p."""
    rows = [[1.0, 0, 0], [0, 0, 1.0], [0.2, 0.3, 0.5], [0.5, 0.5, 0], [0, 0.1, 0.9]]
    for p_row in rows:
        for q_row in rows:
            p, q = (
                torch.tensor([p_row, p_row], dtype=torch.float64),
                torch.tensor([q_row], dtype=torch.float64),
            )
            probs = torch.zeros(3, dtype=torch.float64)
            for share, number in cells(q[0]):
                guess = int((q[0].cumsum(0) <= number).sum())
                proposal = Proposal.of([[guess]], q.unsqueeze(0), [["draft"]])
                for weight, numbers in outcomes(proposal, p.unsqueeze(0), 0, BOTH):
                    verdict = verify(
                        proposal, p.unsqueeze(0), torch.tensor([numbers], dtype=torch.float64)
                    )
                    probs[guess if verdict.num_accepted[0] else verdict.next_tokens[0]] += (
                        share * weight
                    )
            assert (probs - p[0]).abs().max() < 1e-15


def test_a_biased_last_number_is_noticed():
    """The textbook's numbers stand at both edges of each cell, so a last number a thousandth too
    small tells."""
    table = Table(3, 0)
    p, q = table.row((0,)), table.row((1,))
    proposal = Proposal.of([[int(q.argmax())]], q.view(1, 1, 3), [["draft"]])
    rows = torch.stack((p, table.row((0, 1)))).unsqueeze(0)
    tokens = []
    for scale in (1, 0.999):
        numbers = torch.tensor(
            [row for _, row in outcomes(proposal, rows, 0, BOTH)], dtype=torch.float64
        )
        numbers[:, -1] *= scale
        tokens.append(
            [verify(proposal, rows, number.unsqueeze(0)).next_tokens for number in numbers]
        )
    assert tokens[0] != tokens[1]


def test_a_residual_that_vanishes_falls_back_to_p():
    """In float32 u q(x) < p(x) may fail by rounding though p = q; then nothing is left of p - q."""
    p = torch.full((1, 2, 4), 0.25)
    proposal = Proposal.of([[2]], p[:, :1] + 1e-8, [["draft"]])
    verdict = verify(proposal, p, torch.tensor([[1.0, 0.6]], dtype=torch.float64))
    assert verdict.num_accepted == [0]
    assert verdict.next_tokens == [2]
