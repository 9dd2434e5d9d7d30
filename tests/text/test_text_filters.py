"""Penalties, bias, bad words and the least number of tokens: the distribution of the real cascade
under them, summed over every random number, is that of their definitions in plain Python."""

import functools
import math

import pytest
import torch

from minitri.core.decoding.sampling import probs_from_logits
from minitri.core.decoding.text_filters import TextFilters
from minitri.core.decoding.verification import Proposal, verify_block
from minitri.core.runner import ModelRunner
from minitri.core.settings import SamplingParams
from tests.conftest import tiny_model
from tests.core import exactness
from tests.core.exactness import PROMPT, Table, exactly
from tests.core.rigs import fresh_read, new_cache, random_prompt, tiny_config
from tests.trees.exactness import largest_error as largest_error_of_trees
from tests.trees.test_tree_enumeration import SHAPES

ROUNDING = 1e-12
PENALTIES = SamplingParams(
    1.0, repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.5, logit_bias={0: 4.0}
)
WORDS = [[2], [1, 0], [0, 1, 1]]
FORBIDDEN = SamplingParams(1.0, presence_penalty=-0.8, min_tokens=2)
END = 1


class Shaped:
    """Distributions under filters, by their definitions; `scores` are logits after a text."""

    def __init__(self, V, scores, params: SamplingParams, words=(), allowed=None, start=2) -> None:
        self.V, self.scores, self.params, self.start = V, scores, params, start
        self.words, self.allowed = words, allowed
        self.row = functools.cache(self._row)

    def _row(self, context: tuple[int, ...]) -> torch.Tensor:
        params, output = self.params, context[self.start :]
        scores = []
        for token, x in enumerate(self.scores(context)):
            x += dict(params.logit_bias).get(token, 0)
            if token in context:
                x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
            count = output.count(token)
            x -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
            scores.append(x)
        tokens = range(self.V)
        if self.allowed:
            scores = self.without(scores, [self.allowed(output, token) for token in tokens])
        is_bad = [
            any((*context, token)[-len(word) :] == tuple(word) for word in self.words)
            or (token == END and len(output) < params.min_tokens)
            for token in tokens
        ]
        left_V = exactly(self.without(scores, [not bad for bad in is_bad]))
        return probs_from_logits(left_V.unsqueeze(0), params)[0]

    def without(self, scores, are_kept):
        kept = [x if is_kept else -math.inf for x, is_kept in zip(scores, are_kept, strict=True)]
        return kept if max(kept) > -math.inf else scores


def error(
    params,
    *sizes,
    words=(),
    make_matcher=lambda: None,
    allowed=None,
    largest_error=exactness.largest_error,
    **settings,
) -> float:
    def make_filters():
        options = {"end_tokens": [END], "bad_words": words, "matcher": make_matcher()}
        return TextFilters(params, PROMPT, sizes[0], **options)

    def by_definition(table: Table) -> Shaped:
        return Shaped(table.V, lambda text: table.row(text).log().tolist(), params, words, allowed)

    settings |= {"make_filters": make_filters, "by_definition": by_definition}
    return largest_error(*sizes, **settings)


KINDS = pytest.mark.parametrize(("params", "words"), [(PENALTIES, ()), (FORBIDDEN, WORDS)])


@KINDS
@pytest.mark.parametrize("sizes", [(3, 1, 1), (3, 2, 2), (4, 2, 0), (4, 0, 2), (4, 0, 0)])
def test_both_levels_together_give_the_filtered_distribution(sizes, params, words):
    assert error(params, *sizes, words=words) < ROUNDING


@KINDS
@pytest.mark.parametrize("sizes", [(3, 4, 0), (3, 2, 1)])
def test_blocks_give_the_filtered_distribution(sizes, params, words):
    assert error(params, *sizes, words=words, horizon=4, rule=verify_block) < ROUNDING


@KINDS
@pytest.mark.parametrize("sizes", [(3, 1, 0), (3, 1, 1)])
def test_nodes_of_trees_are_filtered_by_their_own_paths(sizes, params, words):
    settings = {"shape": SHAPES["lopsided"], "largest_error": largest_error_of_trees}
    assert error(params, *sizes, words=words, horizon=2, **settings) < ROUNDING


def test_nothing_leaks_from_one_step_into_the_next():
    """After a step those tokens count that the target accepted."""
    assert error(PENALTIES, 3, 1, 1, num_steps=2) < ROUNDING


@pytest.mark.parametrize("filters", [{"top_p": 0.7}, {"min_p": 0.2}])
def test_bias_and_penalties_come_before_temperature_and_other_filters(filters):
    """By a model's runner, one block of four places."""
    model = tiny_model(tiny_config(vocab_size=20))
    bias = {3: 2.0, 9: -3.0, 11: 100}
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "logit_bias": bias}
    params = SamplingParams(0.6, **filters, **penalties)
    prompt, guesses = random_prompt(model.config, 12), [3, 4, 4]
    runner = ModelRunner(model, new_cache(model.config), params, vocab_size=20)
    runner.sample_by(0, params, TextFilters(params, prompt, 20))
    proposal = Proposal.of([guesses], torch.ones(1, 3, 1), [["draft"] * 3])
    output = runner.next_probs([prompt], [True], proposal)

    def scores(text):
        return output.logits_BNV[0, len(text) - 12].tolist()

    shaped = Shaped(20, scores, params, start=12)
    for n in range(4):
        wanted_V = shaped.row((*prompt, *guesses[:n]))
        assert torch.allclose(output.probs_BNV[0, n].double(), wanted_V, atol=1e-6)
        raw_V = fresh_read(model, [*prompt, *guesses[:n]])[1][-1]
        assert torch.allclose(output.logits_BNV[0, n], raw_V, atol=1e-4)
