"""Grammars: text that they force, texts of schemas, and what is refused."""

import json
from pathlib import Path
from unittest.mock import Mock

import jsonschema
import pytest

from minitri import Grammar, Request, SamplingParams
from minitri.core.decoding.verification import verify, verify_block
from minitri.text import matcher
from minitri.text.matcher import GrammarMatcher, compiled
from minitri.text.tokenizer import Tokenizer
from tests.conftest import byte_level_tokenizer, ends_of, refused
from tests.core.rigs import tiny_config
from tests.text.test_text_filters import KINDS, ROUNDING, TOY, error

TEXTS = "tests.text.test_text_filters.TEXTS"


@pytest.mark.parametrize(("sizes", "rule"), [((2, 1), verify), ((3, 0), verify_block)])
def test_a_grammar_does_not_say_how_its_only_text_is_cut(sizes, rule, monkeypatch):
    monkeypatch.setattr(TEXTS, ["abab"])
    for seed in (2, 3, 4):  # of tables in which both cuts are likely
        assert error(*sizes, rule=rule, seed=seed, **KINDS["grammar"]) < ROUNDING


MUCH = "more than 1 s, or too much memory"
REFS = {f"r{n}": {"properties": {"a": {"$ref": f"#/$defs/r{n + 1}"}}} for n in range(700)}
RULES = "".join(f'r{n}: "a" r{n + 1}\n' for n in range(2900))
REFUSED = [
    ("json_schema", '{"$ref": "#"}', "cannot be used (it allows no text)"),
    ("json_schema", json.dumps({"enum": ["x" * 10**7]}), "at most 131072 characters"),
    ("json_schema", '{"items": ' * 3000 + "{}" + "}" * 3000, "the json_schema cannot be read"),
    ("json_schema", '{"enum": [9007199254740993]}', "rounds the number 9007199254740993"),
    ("json_schema", '{"maximum": 9223372036854775808}', "rounds the number 9223372036854775808"),
    ("regex", "(a", "the regex cannot be used (invalid"),
    ("lark", 'start: "a" $', "(line 1, column 12: lexer error"),
    ("gbnf", "root ::= x", "gbnf"),
    # Others end the process, or take seconds, minutes or 500 MB of it.
    ("lark", f'start: r0\n{RULES}r2900: "b"', MUCH),
    ("lark", "start: " + "s " * 16384 + '\ns: "a" | s s |', "the lark cannot be used"),
    ("json_schema", json.dumps({"$ref": "#/$defs/r0", "$defs": REFS}), MUCH),
    ("json_schema", json.dumps({"properties": dict.fromkeys(map(str, range(6000)), True)}), "keys"),
    ("lark", RULES * 2, "keys or rules"),
    ("json_schema", '{"type": "integer", "multipleOf": 8192000}', MUCH),
]


@pytest.mark.parametrize(("kind", "text", "word"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_grammar_is_refused_in_one_line(kind, text, word):
    tokenizer = Tokenizer(byte_level_tokenizer())
    with refused(word):
        compiled(Grammar(kind, text), tokenizer, tiny_config(vocab_size=320, eos_token_ids=(2,)))


def test_the_only_text_of_a_grammar_ends_where_the_output_does(engine):
    grammar = Grammar("choice", json.dumps(["She had been forced into prudence " * 9]))
    how = {"method": "naive", "gamma1": 2, "max_new_tokens": 3, "grammar": grammar}
    assert len(engine.complete("a", **how).token_ids) == 3


def test_a_grammar_is_compiled_once_be_it_short_or_long(engine, monkeypatch):
    compile_once = Mock(return_value="")
    monkeypatch.setattr(matcher, "probe", compile_once)
    for length in (9, 1 << 14) * 2:
        compiled(Grammar("choice", ["x" * length]), engine.tokenizer, engine.config)
    assert compile_once.call_count == 2


def test_a_model_without_an_end_token_has_no_grammars():
    with refused("no end-of-sequence token"):
        compiled(Grammar("json_object"), TOY, tiny_config(vocab_size=4))


def test_white_space_of_json_ends(engine):
    start = compiled(Grammar("json_object"), engine.tokenizer, engine.config)
    [brace, line] = (engine.tokenizer.encode(text)[-1] for text in ("{", "\n"))
    lines = [
        GrammarMatcher(start.deep_copy(), engine.config).forbidden([brace, *[line] * num])
        for num in (15, 16)
    ]
    assert [bool(forbidden_V[line]) for forbidden_V in lines] == [False, True]


SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text("utf-8"))


def test_what_ends_by_itself_is_valid(engine):
    """A text that its length cuts says so."""
    requests = []
    for number, schema in enumerate(SCHEMAS * 2):
        sampling = SamplingParams(1.0, grammar=Grammar("json_schema", schema))
        requests.append(Request([9, number] * 10, number, sampling, max_new_tokens=80))
    ends = ends_of(engine.stream(requests, method="triforce"))
    assert {end.finish_reason for end in ends} <= {"eos", "length"}
    whole = [end for end in ends if end.finish_reason == "eos"]
    assert len(whole) > len(ends) // 2
    for end in whole:
        jsonschema.validate(json.loads(end.text), SCHEMAS[end.row % len(SCHEMAS)])
