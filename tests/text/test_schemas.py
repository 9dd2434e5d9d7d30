"""Texts of 30 schemas at temperature 1: whatever ends by itself is valid, by `jsonschema`.

More of them: MINITRI_SCHEMA_REQUESTS=2000 python -m pytest -s tests/text/test_schemas.py
"""

import json
import os
import random
from collections import Counter

import jsonschema
import pytest

from minitri import End, Grammar, Request, SamplingParams
from minitri.text.matcher import GrammarMatcher, compiled
from tests.core.rigs import random_prompt

NUM_REQUESTS = int(os.environ.get("MINITRI_SCHEMA_REQUESTS", "60"))


def of(properties: dict, required=None, **more) -> dict:
    """An object of these alone."""
    required = [*properties] if required is None else required
    closed = {"additionalProperties": False, "required": required}
    return {"type": "object", "properties": properties, **closed, **more}


INT, TEXT, BOOL = {"type": "integer"}, {"type": "string", "maxLength": 12}, {"type": "boolean"}
NODE = of({"value": INT, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
TREE = of({"name": TEXT, "children": {"type": "array", "maxItems": 2, "items": {"$ref": "#"}}})
SCHEMAS = [
    of({"n": INT}),
    of({"a": INT, "b": {"type": "number"}, "c": BOOL, "d": {"type": "null"}}),
    of({"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    of({"color": {"enum": ["red", "green", "blue"]}}),
    of({"mixed": {"enum": [1, "one", None, True, [1, 2], {"k": "v"}]}}),
    of({"kind": {"const": "point"}, "x": {"type": "number"}, "y": {"type": "number"}}),
    of({"a": INT, "b": INT, "c": INT}, ["b"]),
    of({}, [], additionalProperties={"type": "integer"}, maxProperties=3) | {"maxProperties": 3},
    {"type": "array", "items": INT, "minItems": 2, "maxItems": 5},
    {"type": "array", "prefixItems": [TEXT, INT, BOOL], "items": False, "minItems": 3},
    {"type": "array", "items": {"type": "array", "items": BOOL, "maxItems": 3}, "maxItems": 3},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,5}(-[0-9]{1,3})?$"},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "integer", "minimum": -7, "maximum": 1234},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 95},
    {"type": ["string", "null"], "maxLength": 5},
    {"anyOf": [INT, {"type": "string", "enum": ["none", "all"]}, of({"id": INT})]},
    {"oneOf": [of({"cat": BOOL}), of({"dog": INT})]},
    {"allOf": [of({"a": INT, "b": TEXT}, []), {"type": "object", "required": ["a"]}]},
    {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    TREE,
    of({"é": TEXT, "日本": {"enum": ["東京", "大阪", "naïve", "🙂🚀"]}}),
    of({"quote": {"enum": ['say "hi"', "back\\slash", "new\nline", "tab\t", "\u0001"]}}),
    of({"long": {"type": "string", "minLength": 60, "maxLength": 70}}),
    of({"text": {"type": "string", "maxLength": 200}}),
    of({f"field_{i}": {"enum": [f"v{i}", i]} for i in range(12)}),
    of({"a": of({"b": of({"c": of({"d": {"type": "array", "items": INT, "maxItems": 2}})})})}),
]


@pytest.mark.parametrize("method", ["triforce", "auto"])
def test_what_ends_by_itself_is_valid(engine, method):
    """A text that its length cuts says so."""
    assert len(SCHEMAS) == 30
    numbers = range(NUM_REQUESTS // 2)
    requests = [
        Request(
            random_prompt(engine.config, 20, seed=n),
            n,
            SamplingParams(1.0, grammar=Grammar("json_schema", json.dumps(SCHEMAS[n % 30]))),
            max_new_tokens=250,
        )
        for n in numbers
    ]
    reasons = Counter()
    guessed = 0
    for end in engine.stream(requests, method=method):
        if isinstance(end, End):
            reasons[end.finish_reason] += 1
            guessed += sum(token.origin == "draft" for token in end.tokens)
            if end.finish_reason == "eos":
                schema = SCHEMAS[end.row % 30]
                checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
                jsonschema.validate(json.loads(end.text), schema, format_checker=checker)
    print(f"\n  {method}: {dict(reasons)}, {guessed} tokens were guessed")
    assert reasons["eos"] + reasons["length"] == len(requests)
    assert reasons["eos"] > len(requests) // 2


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_to_ask_what_is_forced_changes_no_mask(engine, number):
    grammar = Grammar("json_schema", json.dumps(SCHEMAS[number]))
    start = compiled(grammar, engine.tokenizer, engine.config)
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
