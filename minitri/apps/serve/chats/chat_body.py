"""Strict JSON objects as pydantic models: base class, messages and tools of a chat.

Values are not converted: true is no number. An error is one line for the client."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from minitri.apps.cli.report import Json, json_line
from minitri.core.errors import shorten
from minitri.files.hf_config import without_null

FIELDS = json.loads(Path(__file__).with_name("fields.json").read_text("utf-8"))
"""`advice` by pydantic's type of error, where its words are for Python; by field, if given
`twice`, under two names; `ignored` unknown fields, which change no answer; `neutral` values of
unknown fields, which ask for nothing, as null does; elsewhere false, 0 or [] may ask for some."""
T = TypeVar("T")
B = TypeVar("B", bound="Body")
Many = Annotated[tuple[T, ...], Field(fail_fast=True, strict=False)]
"""A list as a tuple, checked up to its first bad item: a body may have a million of them."""


class Body(pydantic.BaseModel):
    """Base class of JSON objects without conversions: true is no number, and "3" is none."""

    model_config = pydantic.ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_unasked(cls, given: Any) -> Any:
        """Leaves out nulls, and fields to be ignored, or with neutral values, by fields.json."""
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in without_null(given).items()
            if name not in FIELDS["ignored"] and value not in FIELDS["neutral"].get(name, ())
        }


class ApiError(Exception):
    """Error for a refused request: HTTP status, OpenAI's code, one line, and perhaps a field."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def checked(kind: type[B], content: Any, *, lenient: bool = False) -> B:
    """Checks a JSON object by the pydantic model `kind`. Raises `ApiError` about the innermost
    problem. Unknown fields are refused, or ignored if `lenient`."""
    try:
        return kind.model_validate(content, extra="ignore" if lenient else None)
    except pydantic.ValidationError as error:
        problem = max(error.errors(), key=lambda problem: len(problem["loc"]))
    place = ".".join(  # without the kinds of fields that may be a text or a list
        step for step in map(str, problem["loc"]) if step != "str" and not step.startswith("tuple[")
    )
    fault = problem["type"]
    got = "missing" if fault == "missing" else shorten(json_line(problem["input"]), 60)
    advice = FIELDS["advice"].get(fault, "{msg}")
    if fault == "extra_forbidden":
        schema = kind.model_json_schema()
        *outer, name = problem["loc"]
        objects = schema["$defs"].values() if outer else [schema]
        known = {field for each in objects for field in each["properties"]}
        for near in get_close_matches(name, known - content.keys(), 1, 0.8):
            advice = f"did you mean {near}?"
        advice = FIELDS["twice"].get(place, advice)
    advice = advice.format(**problem, **problem.get("ctx", {}))
    message = f"{shorten(place, 80) or 'body'} is {got}; {advice}"
    raise ApiError(400, "invalid_request", message, place or None)


class Part(Body, extra="ignore"):
    """Part of a chat message's content: a text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class CalledFunction(Body, extra="ignore"):
    """Name and arguments of a function that an assistant called."""

    name: str
    arguments: Annotated[
        pydantic.Json[Json], BeforeValidator(lambda text: "{}" if text == "" else text)
    ]
    """An object of JSON, as a text."""


class ToolCall(Body, extra="ignore"):
    """Call of a function by an assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


def joined(content: str | tuple[Part, ...]) -> str:
    """The text of a message's content, its parts joined."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Message(Body):
    """Message of a chat."""

    role: str
    content: Annotated[str | Many[Part], AfterValidator(joined)] = ""
    """A text, or parts of type text."""
    name: Any = None
    """Ignored."""
    reasoning_content: str = ""
    """Thinking of the role assistant."""
    tool_calls: Many[ToolCall] = ()
    """Calls by the role assistant."""
    tool_call_id: str = ""
    """Id of the call whose result a message of the role tool is."""


class Function(Body, extra="ignore"):
    """Function that an answer may call."""

    type: Literal["function"] = "function"
    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    parameters: Json = Field({"type": "object", "properties": {}})
    """JSON Schema of its arguments."""
    strict: bool = False
    """Refuse the request if arguments cannot be held to the whole schema."""


def functions_of(tools: object) -> object:
    """Functions, as objects, in the `tools` of a chat or a response. Raises `ValueError`."""
    if not isinstance(tools, list):
        return tools
    if not all(isinstance(tool, dict) and tool.get("type") for tool in tools):
        raise ValueError("give objects of a type, such as function")
    return [tool.get("function", tool) for tool in tools if tool["type"] == "function"]


def choice_of(choice: object) -> object:
    """The function's name in an object `tool_choice`; a word such as `auto` is returned as is."""
    match choice:
        case {"type": "function", "function": {"name": name}} | {"type": "function", "name": name}:
            return name
    return choice


class Conversation(Body):
    """Messages of a chat, and which functions the answer may call."""

    instructions: str = ""
    """A message of the system, before the others."""
    messages: Many[Message] = Field(min_length=1)
    """The conversation. Answers may have tool_calls, and messages of the role tool the tool_call_id
    of one."""
    continue_final_message: bool = False
    """Go on with the text of the last message, without calls."""
    tools: Annotated[
        Many[Function], BeforeValidator(functions_of, json_schema_input_type=Many[Json])
    ] = ()
    """Functions that the answer may call; tools of other types are left out."""
    tool_choice: Annotated[str, BeforeValidator(choice_of, json_schema_input_type=str | Json)] = (
        "auto"
    )
    """Whether the answer calls functions: auto, none, required, or the function to call."""
    parallel_tool_calls: bool = True
    """Whether the answer may call several functions."""
