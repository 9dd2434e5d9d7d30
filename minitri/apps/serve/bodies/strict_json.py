"""Strict JSON objects as pydantic models, with errors that are one line for the client."""

import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator

from minitri.core.errors import InputError, explain, shorten

ADVICE = {
    "missing": "give it",
    "int_type": "it must be a whole number",
    "bool_type": "it must be true or false",
    "tuple_type": "it must be a list",
    "model_type": "it must be an object",
    "dict_type": "it must be an object",
    "json_type": "give an object of JSON as a text",
    "json_invalid": "give an object of JSON as a text",
    "extra_forbidden": "this server does not know it; leave it out",
}
"""Advice by the type of pydantic's error, where pydantic's words are meant for Python."""
T = TypeVar("T")
Json = dict[str, Any]
Many = Annotated[tuple[T, ...], Field(fail_fast=True, strict=False)]
"""A list as a tuple, checked up to its first bad item: a body may have a million of them."""


class Body(BaseModel):
    """JSON object without conversions of types: true is no number, and "3" is none either."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        regex_engine="python-re",
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, given: Any) -> Any:
        """Null is as if nothing was given; unknown fields that are empty ask for nothing."""
        if not isinstance(given, dict):
            return given
        known = cls.model_fields
        return {name: v for name, v in given.items() if v or (name in known and v is not None)}


B = TypeVar("B", bound=Body)


def says(advice: str) -> WrapValidator:
    """A pydantic validator: any error of a value becomes this advice for the client."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(advice) from None

    return WrapValidator(check)


def read_object(body: bytes) -> Json:
    """JSON object that a body is. Raises `InputError`."""
    with explain("the body is no object of JSON", "send an object"):
        return {**json.loads(body)}


def checked(kind: type[B], content: object) -> B:
    """The content as a model. Raises `InputError` for the first thing that is wrong."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        raise cause
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in problem["loc"])
    place = shorten("".join(steps)[1:], 60)
    kind_of_error = problem["type"]
    got = "missing" if kind_of_error == "missing" else shorten(repr(problem["input"]), 60)
    advice = problem["msg"].replace("Input should be", "it must be").removeprefix("Value error, ")
    raise InputError(f"{place} is {got}; {ADVICE.get(kind_of_error, advice)}")
