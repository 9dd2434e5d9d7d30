"""The JSON of a request's body, and values in it that are more than a number or a text."""

import json
from typing import Any

from minitri import Grammar, InputError
from minitri.core.errors import explain, shorten

SCHEMAS = ("schema", "parameters", "json")
"""Names of what is JSON Schema, in which null is a value."""
KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
"""Of grammars, by vLLM's names."""


def read_object(body: bytes) -> dict[str, Any]:
    """The object that a body is; what is null in it, at any depth, is as if it were not there.
    Raises `InputError`."""
    with explain("the body is no object of JSON", "send an object"):
        return {**without_nulls(json.loads(body))}


def without_nulls(value: Any) -> Any:
    """The same without the pairs of objects that have null."""
    match value:
        case {**pairs}:
            present = {name: it for name, it in pairs.items() if it is not None}
            return {n: it if n in SCHEMAS else without_nulls(it) for n, it in present.items()}
        case [*items]:
            return [*map(without_nulls, items)]
    return value


def is_ids(prompt: Any) -> bool:
    """Whether it is a list of whole numbers."""
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


def grammar_of(form: Any, outputs: Any) -> Grammar | None:
    """What OpenAI's response_format or vLLM's structured_outputs says. Raises `InputError`."""
    match form, outputs:
        case None | {"type": "text"}, None:
            return None
        case {"type": "json_object"}, None:
            return Grammar("json_object")
        case {"type": "json_schema", "json_schema": {"schema": schema}}, None:
            return Grammar("json_schema", json.dumps(schema))
        case None, {**one} if len(one) == 1 and (name := str(*one)) in KINDS:
            text = one[name]
            return Grammar(KINDS[name], text if isinstance(text, str) else json.dumps(text))
    given = shorten(repr(outputs if form is None else form), 60)
    raise InputError(
        f"response_format or structured_outputs is {given}; see /docs for what they may be"
    )
