"""Grammars: masks of a toy vocabulary in which texts can be cut in several ways, enumerated; masks
of tokenizers, against the bytes of tokens; what the library refuses."""

import json
import re
import sys

import pytest

from minitri import Grammar, InputError, SamplingParams
from minitri.core.decoding.verification import verify, verify_block
from minitri.text.matcher import GrammarMatcher, compiled
from minitri.text.tokenizer import Tokenizer, TokenizersBackend
from tests.conftest import byte_level_tokenizer
from tests.core.rigs import tiny_config
from tests.files.refused import refused
from tests.text.test_text_filters import END, ROUNDING, error
from tests.trees.exactness import largest_error as largest_error_of_trees
from tests.trees.test_tree_enumeration import SHAPES

WORDS = {0: "a", END: "", 2: "b", 3: "ab"}
"""The toy vocabulary: `ab` is one token or two, `aab` has two spellings, too."""
TEXTS = ["ab", "b", "aab", "abab"]
FREE = SamplingParams(1.0)


class ToyTokenizer:
    """A tokenizer, as far as a matcher asks."""

    num_tokens = 4

    def lexicon(self):
        return [word.encode() for word in WORDS.values()]


TOY, TOY_CONFIG = ToyTokenizer(), tiny_config(vocab_size=4, eos_token_ids=(END,))


def make_matcher():
    start = compiled(Grammar("choice", json.dumps(TEXTS)), TOY, TOY_CONFIG)
    return GrammarMatcher(start, TOY_CONFIG)


def is_allowed(output: tuple[int, ...], token: int) -> bool:
    """Whether a token may follow, by the definition of the grammar."""
    text = "".join(WORDS[word] for word in output)
    if END in output or not any(word.startswith(text) for word in TEXTS):
        return token == END
    if token == END:
        return text in TEXTS
    return any(word.startswith(text + WORDS[token]) for word in TEXTS)


def grammar_error(*sizes, params=FREE, **settings):
    settings |= {"make_matcher": make_matcher, "allowed": is_allowed}
    return error(params, *sizes, **settings)


@pytest.mark.parametrize("sizes", [(4, 1, 1), (4, 2, 1), (4, 2, 0), (4, 0, 2), (4, 0, 0)])
def test_both_levels_together_give_the_masked_distribution(sizes):
    """Forcing text that the grammar leaves no choice about, cut in one way, would bend it."""
    assert grammar_error(*sizes, horizon=4) < ROUNDING


@pytest.mark.parametrize("sizes", [(4, 2, 1), (4, 3, 0)])
def test_blocks_give_the_masked_distribution_with_penalties_too(sizes):
    params = SamplingParams(1.0, presence_penalty=0.9, logit_bias={3: -1.5})
    assert grammar_error(*sizes, params=params, horizon=4, rule=verify_block) < ROUNDING


@pytest.mark.parametrize("gamma2", [0, 1])
def test_nodes_of_trees_are_masked_by_their_own_paths(gamma2):
    settings = {"shape": SHAPES["lopsided"], "largest_error": largest_error_of_trees}
    assert grammar_error(4, 1, gamma2, **settings) < ROUNDING


@pytest.mark.parametrize("rule", [verify, verify_block])
@pytest.mark.parametrize("sizes", [(4, 1, 1), (4, 2, 1), (4, 3, 0)])
def test_forced_text_is_a_guess_about_how_it_is_cut(sizes, rule, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", ["abab"])
    assert make_matcher().forced([0]) == [2, 3]
    for seed in (2, 3, 4):  # of tables in which both cuts are likely
        assert grammar_error(*sizes, horizon=4, rule=rule, seed=seed) < ROUNDING


def test_what_is_forced_is_asked_once(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", ["ab" * 500])
    asked = make_matcher()
    assert asked.forced([]) == [3] * 500
    monkeypatch.setattr(asked, "_read", None)
    assert asked.forced([3, 3]) == [3] * 498
    monkeypatch.undo()
    asked.extend([3])
    assert asked.forced([3]) == [3] * 498
    assert asked.forced([0])[0] == 2


def test_nothing_leaks_from_one_step_into_the_next():
    assert grammar_error(4, 1, 1, num_steps=2, horizon=4) < ROUNDING


REFUSED = r"""
json_schema | {"$ref": "#"} | it allows no text
json_schema | {"type": "strin"} | Invalid type: strin
regex | (a | unclosed group
lark | start: "a" $ | line 1, column 12: lexer error
"""


@pytest.mark.parametrize("case", REFUSED.strip().splitlines())
def test_what_the_library_cannot_hold_is_refused_in_one_line(case):
    kind, text, word = re.split(r" \| ", case, maxsplit=2)
    tokenizer = Tokenizer(TokenizersBackend(byte_level_tokenizer()), None)
    with refused(f"the {kind} cannot be used (", word):
        compiled(Grammar(kind, text), tokenizer, tiny_config(vocab_size=320, eos_token_ids=(2,)))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps({"enum": ["x" * 10**7]})),
        ("json_schema", '{"items": ' * 3000 + "{}" + "}" * 3000),
        ("json_schema", "[1]"),
        ("json_object", "x"),
        ("regex", ""),
        ("choice", '["a", ""]'),
        ("gbnf", "root ::= x"),
    ],
    ids=lambda text: text[:9],
)
def test_what_is_no_grammar_is_refused_when_it_is_made(kind, text):
    with refused():
        compiled(Grammar(kind, text), TOY, TOY_CONFIG)


def test_a_model_without_an_end_token_has_no_grammars():
    with pytest.raises(InputError, match="no end-of-sequence token"):
        compiled(Grammar("json_object"), TOY, tiny_config(vocab_size=4))
