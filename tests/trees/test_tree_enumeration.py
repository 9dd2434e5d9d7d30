"""The output distribution of cascades that guess trees, computed exactly; see
`tests/decoding/test_enumeration.py`."""

import pytest

from minitri.settings import StepPlan
from minitri.trees.shape import TreeShape, sequences
from tests.exactness import Table, output_distribution, target_distribution
from tests.trees.trees_of_tables import ScriptedTrees, tree_cascade

FORK = TreeShape((-1, 0, 0))
THREE_CHILDREN = TreeShape((-1, 0, 0, 0))
LOPSIDED = TreeShape((-1, 0, 0, 1))
SIX_NODES = TreeShape((-1, 0, 0, 1, 1, 2, 3))
NAMES = {
    FORK: "fork",
    THREE_CHILDREN: "three",
    LOPSIDED: "lopsided",
    SIX_NODES: "six",
    sequences(2, 2): "2x2",
}


def largest_error(V, shape, *, with_middle, with_draft, seed=0, num_steps=1, plans=None):
    target = Table(V, seed)
    middle = Table(V, seed + 1, near=target) if with_middle else None
    draft = Table(V, seed + 2, near=target) if with_draft else None

    def build(source, batch_size):
        return tree_cascade(source, batch_size, shape, target, middle, draft, plans=plans)

    horizon = 3 if V == 3 else 2
    probs = output_distribution(build, horizon, target, num_steps=num_steps, scripted=ScriptedTrees)
    return float((probs - target_distribution(target, horizon)).abs().max())


@pytest.mark.parametrize("seed", [0, 10])
@pytest.mark.parametrize("shape", NAMES, ids=NAMES.get)
def test_a_tree_that_the_target_verifies_gives_its_distribution(shape, seed, capsys):
    error = largest_error(3, shape, with_middle=False, with_draft=True, seed=seed)
    with capsys.disabled():
        print(f"\n  tree {NAMES[shape]}, V=3: largest error {error:.1e}")
    assert error < 1e-12


@pytest.mark.parametrize("shape", [FORK, THREE_CHILDREN, LOPSIDED, sequences(2, 2)], ids=NAMES.get)
def test_a_larger_vocabulary_changes_nothing(shape):
    assert largest_error(4, shape, with_middle=False, with_draft=True) < 1e-12


@pytest.mark.parametrize("shape", [FORK, LOPSIDED], ids=NAMES.get)
def test_a_tree_below_two_levels_gives_the_target_distribution(shape):
    assert largest_error(3, shape, with_middle=True, with_draft=True) < 1e-12


def test_the_retrieval_level_may_grow_a_tree_itself():
    assert largest_error(3, LOPSIDED, with_middle=True, with_draft=False) < 1e-12


def test_nothing_leaks_from_a_tree_into_the_next_step():
    assert largest_error(3, FORK, with_middle=False, with_draft=True, num_steps=2) < 1e-12


def test_chains_and_trees_may_take_turns():
    plans = [StepPlan("naive", 1, 0, "2"), StepPlan("naive", 1)]
    error = largest_error(3, FORK, with_middle=False, with_draft=True, num_steps=2, plans=plans)
    assert error < 1e-12
