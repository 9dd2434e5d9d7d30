"""The output distribution of cascades that guess trees, computed exactly; see
`tests/core/decoding/test_enumeration.py`."""

import pytest

from minitri.core.settings import StepPlan
from minitri.trees.tree_shape import TreeShape, sequences
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


def error(name, V=3, gamma1=1, gamma2=0, **settings):
    horizon = 3 if V == 3 else 2
    return largest_error(V, gamma1, gamma2, horizon=horizon, shape=SHAPES[name], **settings)


@pytest.mark.parametrize("name", SHAPES)
def test_a_tree_that_the_target_verifies_gives_its_distribution(name):
    assert error(name, seed=10) < 1e-12


@pytest.mark.parametrize("name", ["three", "lopsided"])
def test_a_larger_vocabulary_changes_nothing(name):
    assert error(name, V=4) < 1e-12


@pytest.mark.parametrize("name", ["fork", "lopsided"])
@pytest.mark.parametrize("gamma1", [0, 1])
def test_a_tree_by_or_below_the_retrieval_level_gives_the_target_distribution(name, gamma1):
    assert error(name, gamma1=gamma1, gamma2=1) < 1e-12


@pytest.mark.parametrize("plans", [[TREE], [TREE, StepPlan("naive", 1)]], ids=["trees", "turns"])
def test_nothing_leaks_from_a_tree_into_the_next_step_be_it_a_chain(plans):
    assert error("fork", num_steps=2, plans=plans) < 1e-12
