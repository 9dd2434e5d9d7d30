"""Texts of schemas at temperature 1: whatever ends by itself is valid, by `jsonschema`."""

import json
import random

import jsonschema
import pytest

from minitri import End, Grammar, Request, SamplingParams
from minitri.text.matcher import GrammarMatcher, compiled
from tests.core.rigs import random_prompt


def closed(properties: dict, required=None) -> dict:
    """An object of these alone."""
    parts = {"type": "object", "properties": properties, "additionalProperties": False}
    return parts | {"required": [*properties] if required is None else required}


INT, TEXT, BOOL = {"type": "integer"}, {"type": "string", "maxLength": 12}, {"type": "boolean"}
SCHEMAS = [
    closed({"a": INT, "b": {"type": "number"}, "c": BOOL, "d": {"type": "null"}}, ["b"]),
    closed({"mixed": {"enum": [1, "one", None, True, [1, 2], {"k": "v"}]}}),
    closed({"name": TEXT, "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#"}}}),
    closed({"é": TEXT, "日本": {"enum": ["東京", "naïve", "🙂🚀", "back\\slash", "\u0001"]}}),
    {"type": "array", "items": {"type": "array", "items": BOOL, "maxItems": 3}, "maxItems": 3},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,5}(-[0-9]{1,3})?$"},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 95},
    {"anyOf": [INT, {"type": "string", "enum": ["none", "all"]}, closed({"id": INT})]},
]


def grammar_of(schema: dict) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def test_what_ends_by_itself_is_valid(engine):
    """A text that its length cuts says so."""
    requests = []
    for number, schema in enumerate(SCHEMAS * 2):
        sampling = SamplingParams(1.0, grammar=grammar_of(schema))
        prompt = random_prompt(engine.config, 20, seed=number)
        requests.append(Request(prompt, number, sampling, max_new_tokens=200))
    run = engine.stream(requests, method="triforce")
    ends = [event for event in run if isinstance(event, End)]
    assert {end.finish_reason for end in ends} <= {"eos", "length"}
    whole = [end for end in ends if end.finish_reason == "eos"]
    assert len(whole) > len(ends) // 2
    for end in whole:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        schema = SCHEMAS[end.row % len(SCHEMAS)]
        jsonschema.validate(json.loads(end.text), schema, format_checker=checker)


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_to_ask_what_is_forced_changes_no_mask(engine, number):
    start = compiled(grammar_of(SCHEMAS[number]), engine.tokenizer, engine.config)
    asked, other = (GrammarMatcher(start.deep_copy(), engine.config) for _ in range(2))
    source, path = random.Random(number), list[int]()
    for _ in range(60):
        forced = asked.forced(path)
        mask_V = other.forbidden(path)
        assert asked.forbidden(path).equal(mask_V)
        allowed = (~mask_V).nonzero().flatten().tolist()
        assert not forced or forced[0] in allowed
        path.append(source.choice(allowed))
        if source.random() < 0.2:
            for matcher in (asked, other):
                matcher.extend(path)
            path = []
