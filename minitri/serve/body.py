"""The JSON of a request's body, and values in it that are more than a number or a text."""

import json
from typing import Any

from minitri.errors import explain

SCHEMAS = ("schema", "parameters", "json")
"""Names of what is JSON Schema, in which null is a value."""


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
