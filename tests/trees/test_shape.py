"""Shapes of trees: what the nodes see, and which tree of a size is the best."""

import itertools
import math
import random

import pytest

from minitri.core.errors import InputError
from minitri.core.settings import SpeculationConfig, StepPlan
from minitri.trees.tree_shape import TreeShape, sequences, sequoia, shape_of


def test_independent_sequences_part_at_the_root():
    shape = sequences(3, 2)
    assert shape.parents == (-1, 0, 0, 0, 1, 2, 3)
    assert shape.depths == [0, 1, 1, 1, 2, 2, 2]
    assert shape.sizes == [1, 3, 3]
    assert sequences(1, 3).parents == (-1, 0, 1, 2)


def test_a_node_sees_itself_and_its_ancestors():
    shape = TreeShape((-1, 0, 0, 1, 3))
    seen = [row.nonzero().flatten().tolist() for row in shape.mask_TT]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]


@pytest.mark.parametrize("seed", range(12))
def test_sequoia_finds_the_best_tree(seed):
    rng = random.Random(seed)
    rates, left = [], 1.0
    for _ in range(rng.randint(1, 5)):
        rates.append(min(left * rng.random(), *rates[-1:], 1.0))
        left -= rates[-1]
    num_nodes, max_depth = rng.randint(1, 14), rng.randint(1, 5)
    shape = sequoia(rates, num_nodes, max_depth)
    assert len(shape) <= num_nodes + 1
    assert shape.depths == sorted(shape.depths)
    assert shape.depths[-1] <= max_depth
    reached = [1.0]  # odds that a node is accepted, if the r-th child is at `rates[r]`
    for node, parent in enumerate(shape.parents[1:], 1):
        siblings = shape.children[parent]
        assert siblings == list(range(siblings[0], siblings[-1] + 1))
        reached.append(reached[parent] * rates[siblings.index(node)])
    depths = range(1, max_depth + 1)
    possible = [math.prod(path) for n in depths for path in itertools.product(rates, repeat=n)]
    assert sum(reached) == pytest.approx(1 + sum(sorted(possible)[-num_nodes:]))


def test_a_plans_tree_has_its_size_and_depth_and_is_wide_where_guesses_are_unsure():
    by_draft = shape_of(StepPlan("naive", 4, 0, "16"))
    by_target = shape_of(StepPlan("retrieval", 0, 4, "16"))
    assert len(by_draft) == len(by_target) == 17
    assert by_draft.depths[-1] == by_target.depths[-1] == 4
    assert by_draft.sizes[1] > by_target.sizes[1]
    assert shape_of(StepPlan("triforce", 3, 2, "4x3")) == sequences(4, 3)


def test_plans_that_guess_below_the_target_have_the_tree():
    plans = SpeculationConfig("triforce", gamma2=4, tree="12").plans
    assert plans == [StepPlan("triforce", gamma1, 4, "12") for gamma1 in (2, 4)]
    assert SpeculationConfig("retrieval", tree="2x5").plans == [StepPlan("retrieval", 0, 5, "2x5")]
    assert SpeculationConfig("naive", tree="8x8").max_block == 65
    assert SpeculationConfig("auto", gamma1=4, gamma2=6).max_block == 11
    plans = SpeculationConfig("auto", tree="16").plans
    assert {(plan.tree, plan.gamma1 > 0) for plan in plans} == {("16", True), ("", False)}
    with pytest.raises(InputError, match="^gamma1 is "):
        SpeculationConfig(gamma1=2, tree="4x3")
