"""How nodes are drawn and paths are chosen, where enumeration does not look."""

import collections
import itertools

import pytest
import torch

from minitri.trees import walk as trees_walk
from minitri.trees.shape import TreeShape, sequences
from minitri.trees.walk import (
    MISSING,
    CoupledTrees,
    IndependentTrees,
    TreeProposal,
    draw_children,
    likeliest,
    walk,
)

PROBS = torch.tensor([0.5, 0.0, 0.2, 0.3], dtype=torch.float64)


def test_children_are_drawn_without_replacement():
    """Their order has the probability of drawing balls out of an urn."""
    source, counts = IndependentTrees([3]), collections.Counter()
    for _ in range(20_000):
        counts[tuple(source.draw(0, PROBS, 2, 9))] += 1
    for first, second in itertools.permutations((0, 2, 3), 2):
        chance = float(PROBS[first] * PROBS[second] / (1 - PROBS[first]))
        assert counts.pop((first, second)) / 20_000 == pytest.approx(chance, abs=0.012)
    assert not counts


def test_a_child_without_a_token_is_missing():
    assert draw_children(PROBS, [0.99, 0.0, 0.5, 0.5, 0.5])[3:] == [MISSING, MISSING]
    assert likeliest(PROBS.log(), 5) == [0, 3, 2, MISSING, MISSING]


def proposal_of(shape, tokens, q_IV, *, is_listed=False):
    origins = [["draft"] * len(tokens)]
    return TreeProposal.of([tokens], q_IV.unsqueeze(0), origins, shape=shape, is_listed=[is_listed])


def test_a_row_that_guesses_nothing_takes_one_number():
    """As it does where no other row has a tree."""
    shape, source, fresh = TreeShape((-1, 0, 0)), IndependentTrees([3]), IndependentTrees([3])
    proposal = proposal_of(shape, [MISSING, MISSING], torch.zeros(1, 4))
    source.walk(proposal, 0, PROBS.expand(3, 4), 9)
    fresh._uniforms(0, 1)
    assert source._uniforms(0, 5) == fresh._uniforms(0, 5)


def test_missing_nodes_are_never_tested():
    one_hot = torch.tensor([[0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    proposal = proposal_of(TreeShape((-1, 0, 0)), [2, MISSING], one_hot)
    p_NV = PROBS.expand(3, 4)
    assert walk(proposal, 0, p_NV, [0.1, 0.1, 0.0]) == ([1], 0)
    assert walk(proposal, 0, p_NV, [0.99, 0.3, 0.0]) == ([], 3)


def test_listed_children_are_accepted_with_the_verifiers_chance():
    """What the rejected ones had goes to the others."""
    proposal = proposal_of(TreeShape((-1, 0, 0)), [0, 2], torch.empty(1, 4), is_listed=True)
    p_NV = PROBS.expand(3, 4)
    assert walk(proposal, 0, p_NV, [0.0, 0.49, 0.9])[0] == [1]
    assert walk(proposal, 0, p_NV, [0.0, 0.51, 0.39])[0] == [2]  # 0.2 of the 0.5 that are left
    assert walk(proposal, 0, p_NV, [0.99, 0.51, 0.41]) == ([], 3)


def test_a_residual_that_vanishes_in_floating_point_keeps_what_was_there():
    q_IV = torch.full((1, 4), 0.25)
    proposal = proposal_of(TreeShape((-1, 0)), [2], q_IV)
    assert walk(proposal, 0, torch.full((2, 4), 0.25), [0.6, 1.0]) == ([], 2)


def test_coupled_children_share_the_noise_of_their_position():
    """The eldest is what a chain would have guessed, and the walk follows the verifier's token."""
    source, q_V = CoupledTrees([5]), torch.rand(50, generator=torch.Generator().manual_seed(0))
    q_V /= q_V.sum()
    children = source.draw(0, q_V, 3, 17)
    assert len(set(children)) == 3
    assert source.draw(0, q_V, 1, 17) == children[:1]
    shape = sequences(3, 1)
    proposal = proposal_of(shape, children[::-1], q_V.unsqueeze(0), is_listed=True)
    path, _ = source.walk(proposal, 0, q_V.expand(4, 50), 17)
    assert path == [3]


def test_every_child_and_every_test_has_a_number_of_its_own(monkeypatch):
    from minitri import SamplingParams, SpeculationConfig
    from tests.cascades import tiny_engine

    drawn = collections.defaultdict(list)
    real = trees_walk.IndependentTrees._uniforms

    def noting(source, b, count):
        numbers = real(source, b, count)
        drawn[b] += numbers
        return numbers

    monkeypatch.setattr(trees_walk.IndependentTrees, "_uniforms", noting)
    list(
        tiny_engine().generate(
            [[5, 6, 7], [8, 9]],
            sampling=SamplingParams(1.1),
            seed=4,
            speculation=SpeculationConfig("naive", gamma1=2, tree="5"),
        )
    )
    numbers = [*drawn[0], *drawn[1]]
    assert len(numbers) > 500
    assert len(set(numbers)) == len(numbers)
