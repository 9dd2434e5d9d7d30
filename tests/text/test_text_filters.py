"""Penalties, bias, bad words, the least number of tokens and grammars: the distribution of the real
cascade, summed over every random number, is that of their definitions in plain Python."""

import functools
import json
import math

import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from minitri.core.decoding.sampling import probs_from_logits
from minitri.core.decoding.text_filters import TextFilters
from minitri.core.decoding.verification import Proposal, verify_block
from minitri.core.runner import ModelRunner, Passes
from minitri.core.settings import SamplingParams
from minitri.text.grammar import Grammar
from minitri.text.matcher import GrammarMatcher, compile_short, compiled
from minitri.text.tokenizer import Tokenizer
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
UNLIKELY = SamplingParams(1.0, presence_penalty=0.9, logit_bias={3: -1.5})
WORDS = [[2], [1, 0], [3, 0, 1]]
FORBIDDEN = SamplingParams(1.0, presence_penalty=-0.8, repetition_penalty=0.7, min_tokens=2)
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


LETTERS = {0: "a", END: "</s>", 2: "b", 3: "ab"}
"""The vocabulary of the grammar: `ab` is one token or two, `aab` has two spellings, too."""
TEXTS = ["ab", "b", "aab", "abab"]
TOY_CONFIG = tiny_config(vocab_size=4, eos_token_ids=(END,))


PIPELINE = tokenizers.Tokenizer(models.BPE({text: n for n, text in LETTERS.items()}, [("a", "b")]))
PIPELINE.decoder = decoders.ByteLevel()
PIPELINE.add_special_tokens(["</s>"])
TOY = Tokenizer(PIPELINE)


def make_matcher():
    start = compiled(Grammar("choice", json.dumps(TEXTS)), TOY, TOY_CONFIG)
    return GrammarMatcher(start, TOY_CONFIG)


def is_allowed(output: tuple[int, ...], token: int) -> bool:
    """Whether a token may follow, by the definition of the grammar."""
    text = "".join(LETTERS[word] for word in output)
    if END in output or not any(word.startswith(text) for word in TEXTS):
        return token == END
    if token == END:
        return text in TEXTS
    return any(word.startswith(text + LETTERS[token]) for word in TEXTS)


KINDS = {
    "penalties": {"params": PENALTIES},
    "words": {"params": FORBIDDEN, "words": WORDS, "V": 4},
    "grammar": {"params": UNLIKELY, "make_matcher": make_matcher, "allowed": is_allowed, "V": 4},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def error(
    *gammas,
    params,
    words=(),
    make_matcher=lambda: None,
    allowed=None,
    V=3,
    horizon=4,
    largest_error=exactness.largest_error,
    **settings,
) -> float:
    compile_short.cache_clear()  # by code that a mutant may have changed

    def make_filters():
        options = {"end_tokens": [END], "bad_words": words, "matcher": make_matcher()}
        return TextFilters(params, PROMPT, V, **options)

    def by_definition(table: Table) -> Shaped:
        return Shaped(V, lambda text: table.row(text).log().tolist(), params, words, allowed)

    settings |= {"make_filters": make_filters, "by_definition": by_definition}
    return largest_error(V, *gammas, horizon=horizon, **settings)


@every_kind
@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 0), (0, 2)])
def test_both_levels_together_give_the_filtered_distribution(sizes, kind):
    """Forcing text that a grammar leaves no choice about, cut in one way, would bend it."""
    assert error(*sizes, **kind) < ROUNDING


@every_kind
@pytest.mark.parametrize("sizes", [(3, 0), (2, 1)])
def test_blocks_give_the_filtered_distribution(sizes, kind):
    assert error(*sizes, rule=verify_block, **kind) < ROUNDING


@every_kind
@pytest.mark.parametrize("gamma2", [0, 1])
def test_nodes_of_trees_are_filtered_by_their_own_paths(gamma2, kind):
    settings = {"shape": SHAPES["lopsided"], "largest_error": largest_error_of_trees}
    kind = kind | {"V": 4 if "allowed" in kind else 3}
    assert error(1, gamma2, horizon=2, **settings, **kind) < ROUNDING


@pytest.mark.parametrize("kind", [KINDS["penalties"] | {"V": 2}, KINDS["grammar"]])
def test_nothing_leaks_from_one_step_into_the_next(kind):
    """After a step those tokens count that the target accepted."""
    assert error(1, 1, num_steps=2, **kind) < ROUNDING


@pytest.mark.parametrize("filters", [{"top_p": 0.7}, {"min_p": 0.2}])
def test_bias_and_penalties_come_before_temperature_and_other_filters(filters):
    """A model's runner reads one block of four places."""
    model = tiny_model(tiny_config(vocab_size=20))
    bias = {3: 2.0, 9: -3.0, 11: 100}
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "logit_bias": bias}
    params = SamplingParams(0.6, **filters, **penalties)
    prompt, guesses = random_prompt(model.config, 12), [3, 4, 4]
    runner = ModelRunner(Passes(model, new_cache(model.config), params, 20))
    runner.set_sampling(0, params, TextFilters(params, prompt, 20))
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


def test_a_long_bad_word_is_seen_next_to_short_ones():
    filters = TextFilters(SamplingParams(), PROMPT, 4, bad_words=[[2], [*PROMPT, 3]])
    filters.extend(PROMPT)
    logits_NV = torch.zeros(1, 4)
    filters.apply(logits_NV, [[]])
    assert logits_NV.isinf().tolist() == [[False, False, True, True]]
    filters.apply(smaller_NV := torch.zeros(1, 3), [[]])  # of a drafter that lacks the last token
    assert smaller_NV.isinf().tolist() == [[False, False, True]]
