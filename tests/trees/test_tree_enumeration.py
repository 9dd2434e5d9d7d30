"""The output distribution of cascades that guess trees, computed exactly, as in
`tests/core/decoding/test_enumeration.py`; drawing nodes and walking through them, one by one."""

import pytest
import torch

from minitri.core.decoding.random_source import IndependentSource
from minitri.core.settings import StepPlan
from minitri.core.stats import Meter, Stats
from minitri.trees.tree_level import (
    MISSING,
    TreeLevel,
    TreeProposal,
    draw_children,
    likeliest,
    walk,
)
from minitri.trees.tree_shape import TreeShape, sequences
from tests.core.exactness import exactly
from tests.trees.exactness import largest_error

SHAPES = {
    "fork": TreeShape((-1, 0, 0)),
    "three": TreeShape((-1, 0, 0, 0)),
    "lopsided": TreeShape((-1, 0, 0, 1)),
    "forks": TreeShape((-1, 0, 0, 1, 1)),
    "deep": TreeShape((-1, 0, 0, 1, 3)),
    "2x2": sequences(2, 2),
}
TREE = StepPlan("naive", 1, 0, "2")


def error(name, gamma1=1, gamma2=0, **settings):
    return largest_error(3, gamma1, gamma2, shape=SHAPES[name], **settings)


@pytest.mark.parametrize("name", SHAPES)
def test_a_tree_that_the_target_verifies_gives_its_distribution(name):
    assert error(name, seed=10) < 1e-12


@pytest.mark.parametrize("name", ["fork", "lopsided"])
@pytest.mark.parametrize("gamma1", [0, 1])
def test_a_tree_by_or_below_the_retrieval_level_gives_the_target_distribution(name, gamma1):
    assert error(name, gamma1=gamma1, gamma2=1) < 1e-12


@pytest.mark.parametrize("plans", [[TREE], [TREE, StepPlan("naive", 1)]], ids=["trees", "turns"])
def test_nothing_leaks_from_a_tree_into_the_next_step_be_it_a_chain(plans):
    assert error("fork", num_steps=2, plans=plans) < 1e-12


PROBS = torch.tensor([0.5, 0.0, 0.2, 0.3], dtype=torch.float64)
FORK = TreeShape((-1, 0, 0))


def test_a_child_without_a_token_is_missing():
    assert draw_children(PROBS, exactly([0.99, 0.0, 0.5, 0.5, 0.5]))[3:] == [MISSING, MISSING]
    assert likeliest(PROBS.log(), 5) == [0, 3, 2, MISSING, MISSING]


def proposal_of(shape, tokens, q_IV):
    return TreeProposal.of([tokens], q_IV.unsqueeze(0), "draft", shape=shape)


def test_a_row_that_guesses_nothing_takes_one_number():
    """Other rows may have trees; without any the row takes one number, too."""
    source, fresh = IndependentSource(), IndependentSource()
    source.restart(0, 3)
    fresh.restart(0, 3)
    proposal = proposal_of(FORK, [MISSING, MISSING], torch.zeros(1, 4))
    level = TreeLevel("draft", Meter(Stats(), None, None), None, source)
    level.walk(proposal, 0, PROBS.expand(3, 4), 9)
    fresh.uniforms(0, 1)
    assert source.uniforms(0, 5).tolist() == fresh.uniforms(0, 5).tolist()


@pytest.mark.parametrize(
    ("tokens", "uniforms", "wanted"),
    [
        ([2, MISSING], [0.1, 0.1, 0.0], ([1], 0)),
        ([2, MISSING], [0.99, 0.3, 0.0], ([], 3)),
        ([0, 2], [0.0, 0.49, 0.9], ([1], 0)),
        ([0, 2], [0.0, 0.51, 0.39], ([2], 0)),  # 0.2 of the 0.5 that are left
        ([0, 2], [0.99, 0.51, 0.41], ([], 3)),
    ],
)
def test_a_child_is_tested_against_what_its_elder_siblings_left(tokens, uniforms, wanted):
    """The likeliest ones are accepted with the verifier's chance, missing ones never tested."""
    one_hot = torch.tensor([[0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    proposal = proposal_of(FORK, tokens, one_hot)
    assert walk(proposal, 0, PROBS.expand(3, 4), exactly(uniforms)) == wanted


def test_a_residual_that_vanishes_in_floating_point_keeps_what_was_there():
    proposal = proposal_of(TreeShape((-1, 0)), [2], torch.full((1, 4), 0.25))
    assert walk(proposal, 0, torch.full((2, 4), 0.25), exactly([0.6, 1.0])) == ([], 2)
