"""What the tuner learns of trees, and when it prefers one."""

import pytest
from minitri.trees.tuner import FIRST_RATE, RESHAPE, TreeTuner

from minitri.settings import StepPlan
from minitri.trees.shape import sequences
from minitri.trees.walk import IndependentTrees
from tests.exactness import Table
from tests.trees.trees_of_tables import tree_cascade

AR, CHAIN, TREE = StepPlan("autoregressive"), StepPlan("naive", 2), StepPlan("naive", 2, 0, "8")
COSTS = {"draft": 0.2, "retrieval": 0.8, "target": 1.0}


def new_tuner(*plans, per_guess=0.0):
    def prior(stage, num_guesses):
        return COSTS[stage] * (1 + per_guess * num_guesses)

    return TreeTuner(list(plans), prior, use_clock=False)


def test_the_rates_of_siblings_are_learned_from_paths():
    tuner = new_tuner(TREE)
    first = tuner.rates("draft")
    assert first[1] == pytest.approx((1 - first[0]) * FIRST_RATE)
    for _ in range(400):  # half of the time the eldest, else the third of four
        tuner.note_path("draft", [0], 0)
        tuner.note_path("draft", [2], 0)
    rates = tuner.rates("draft")
    assert rates[0] == pytest.approx(0.5, abs=0.02)
    assert rates[1] < 0.01
    assert rates == sorted(rates, reverse=True)
    for _ in range(400):
        tuner.note_path("draft", [], 3)
    assert max(tuner.rates("draft")) < 0.01


def test_a_wider_tree_is_chosen_where_the_eldest_child_is_often_wrong():
    sure, unsure = new_tuner(TREE), new_tuner(TREE)
    for _ in range(200):
        sure.note_path("draft", [0, 0], 0)
        unsure.note_path("draft", [1], 2)
        unsure.note_path("draft", [0], 2)
    assert sure.shape(TREE).sizes[1] < unsure.shape(TREE).sizes[1]


def test_shapes_stay_for_some_steps():
    tuner = new_tuner(TREE)
    tuner.choose()
    shape = tuner.shape(TREE)
    for _ in range(200):
        tuner.note_path("draft", [], 8)
    for _ in range(RESHAPE - 1):
        tuner.choose()
        assert tuner.shape(TREE) is shape
    tuner.choose()
    assert tuner.shape(TREE) is not shape


def test_a_tree_is_preferred_only_while_its_nodes_cost_little():
    assert new_tuner(AR, CHAIN, TREE).choose() == TREE
    assert new_tuner(AR, CHAIN, TREE, per_guess=0.2).choose() == CHAIN
    assert new_tuner(AR, CHAIN, TREE, per_guess=2.0).choose() == AR


def test_the_prediction_is_tokens_over_seconds():
    tuner, plan = new_tuner(TREE), StepPlan("naive", 2, 0, "2x2")
    rates = tuner.rates("draft")
    tokens = 1 + rates[0] + rates[1] + rates[0] ** 2 + rates[1] * rates[0]
    assert sequences(2, 2).expected_tokens(rates) == pytest.approx(tokens)
    assert tuner.tokens_per_second(plan) == pytest.approx(tokens / (2 * 0.2 + 1.0))
    below = StepPlan("triforce", 2, 4, "2x2")
    before = tuner.tokens_per_second(below)
    tuner.note_acceptance("retrieval", 100, 100)
    assert tuner.tokens_per_second(below) > before > 0


def test_rows_that_do_not_guess_are_no_rejections():
    """The rates of a row's trees are what they are without a silent row next to it."""
    tables = Table(5, 1), None, Table(5, 2, near=Table(5, 1))
    rates = []
    for guessing in ([True], [True, False]):
        source = IndependentTrees(range(len(guessing)))
        cascade = tree_cascade(source, len(guessing), sequences(2, 2), *tables)
        cascade.guessing = guessing
        for _ in range(12):
            cascade.step()
        rates.append(cascade.tuner.rates("draft"))
    assert rates[0] == rates[1]
