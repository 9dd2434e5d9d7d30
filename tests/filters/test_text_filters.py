"""Penalties, bias, bad words and the least number of tokens: the distribution of the real cascade
under them, summed over every random number, is that of their definitions in plain Python."""

import functools
import math

import pytest
import torch

from minitri.decoding.verification import verify_block
from minitri.filters.text_filters import TextFilters
from minitri.settings import SamplingParams, StepPlan
from tests.exactness import PROMPT, Table, exactly, largest_error
from tests.trees.test_tree_enumeration import SHAPES

ROUNDING = 1e-12
PENALTIES = SamplingParams(
    1.0, repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.5, logit_bias={0: 4.0}
)
WORDS = [[2], [1, 0], [0, 1, 1]]
FORBIDDEN = SamplingParams(1.0, presence_penalty=-0.8, min_tokens=2)
END = 1


class Shaped:
    """A table's distributions under filters, by their definitions."""

    def __init__(self, table: Table, params: SamplingParams, words=(), allowed=None) -> None:
        self.V, self.table, self.params = table.V, table, params
        self.words, self.allowed = words, allowed
        self.row = functools.cache(self._row)

    def _row(self, context: tuple[int, ...]) -> torch.Tensor:
        params, output = self.params, context[len(PROMPT) :]
        scores = []
        for token, p in enumerate(self.table.row(context).tolist()):
            x = math.log(p) if p else -math.inf
            x += dict(params.logit_bias).get(token, 0)
            if token in context:
                x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
            count = output.count(token)
            x -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
            scores.append(x)
        scores = self.without(
            scores, [not self.allowed or self.allowed(output, it) for it in range(self.V)]
        )
        is_bad = [
            any((*context, token)[-len(word) :] == tuple(word) for word in self.words)
            or (token == END and len(output) < params.min_tokens)
            for token in range(self.V)
        ]
        return exactly(self.without(scores, [not it for it in is_bad])).softmax(0)

    def without(self, scores, are_kept):
        kept = [x if is_kept else -math.inf for x, is_kept in zip(scores, are_kept, strict=True)]
        return kept if max(kept) > -math.inf else scores


def error(params, *sizes, words=(), make_matcher=lambda: None, allowed=None, **settings) -> float:
    def make_filters():
        options = {"end_tokens": [END], "bad_words": words, "matcher": make_matcher()}
        return TextFilters(params, PROMPT, sizes[0], **options)

    def by_definition(table):
        return Shaped(table, params, words, allowed)

    settings |= {"make_filters": make_filters, "by_definition": by_definition}
    return largest_error(*sizes, **settings)


@pytest.mark.parametrize(("params", "words"), [(PENALTIES, ()), (FORBIDDEN, WORDS)])
@pytest.mark.parametrize(
    "sizes", [(3, 1, 1), (3, 2, 2), (4, 2, 1), (4, 2, 0), (4, 0, 2), (4, 0, 0)]
)
def test_both_levels_together_give_the_filtered_distribution(sizes, params, words):
    assert error(params, *sizes, words=words) < ROUNDING


@pytest.mark.parametrize(("params", "words"), [(PENALTIES, ()), (FORBIDDEN, WORDS)])
@pytest.mark.parametrize("sizes", [(3, 4, 0), (3, 1, 1), (3, 2, 1)])
def test_blocks_give_the_filtered_distribution(sizes, params, words):
    horizon = 3 if sizes[1] == 1 else 4
    assert error(params, *sizes, words=words, horizon=horizon, rule=verify_block) < ROUNDING


@pytest.mark.parametrize("gamma2", [0, 1])
@pytest.mark.parametrize("gamma1", [0, 1])
@pytest.mark.parametrize("name", ["fork", "lopsided", "2x2"])
def test_nodes_of_trees_are_filtered_by_their_own_paths(name, gamma1, gamma2):
    if not gamma1 and not gamma2:
        return
    settings = {"shape": SHAPES[name], "horizon": 3 if name == "fork" else 2}
    assert error(PENALTIES, 3, gamma1, gamma2, **settings) < ROUNDING
    assert error(FORBIDDEN, 3, gamma1, gamma2, words=WORDS, **settings) < ROUNDING


def test_nothing_leaks_from_one_step_into_the_next():
    """What is counted after a step is what the target let stand."""
    assert error(PENALTIES, 3, 1, 1, num_steps=2) < ROUNDING
    plans = StepPlan("autoregressive"), StepPlan("naive", 1), StepPlan("triforce", 1, 1)
    assert error(FORBIDDEN, 3, 1, 1, words=WORDS, num_steps=2, plans=plans) < ROUNDING
