"""Strict JSON objects as pydantic models, and of these the messages and tools of a chat.

What a client sends is not converted: true is no number. What is wrong is one line for the client.
"""

import functools
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from minitri.core.errors import InputError, shorten
from minitri.core.fields import refuse
from minitri.core.log import log
from minitri.files.hf_config import without_null

NAME = r"\A(?!(auto|none|required)\Z)[a-zA-Z0-9_.-]{1,64}\Z"
"""A function's name, which is no value of `tool_choice`."""
Json = dict[str, Any]
FIELDS = json.loads(Path(__file__).with_name("fields.json").read_text("utf-8"))
ADVICE: Json = FIELDS["advice"]
"""Advice by the name of a field, or else by the type of pydantic's error, where pydantic's words
are meant for Python."""
NEUTRAL: Json = FIELDS["neutral"]
"""Values of unknown fields that ask for nothing, as null does in all fields. In others false, 0 and
what is empty may ask for something."""
IGNORED: list[str] = FIELDS["ignored"]
"""Unknown fields that change no answer."""
MAX_WARNINGS = 100
T = TypeVar("T")
Many = Annotated[tuple[T, ...], Field(fail_fast=True, strict=False)]
"""A list as a tuple, checked up to its first bad item: a body may have a million of them."""


class Body(pydantic.BaseModel):
    """JSON object without conversions of types: true is no number, and "3" is none either."""

    model_config = pydantic.ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        regex_engine="python-re",
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_unasked(cls, given: Any, info: pydantic.ValidationInfo) -> Any:
        """Leaves out what asks for nothing; of unknown fields all, with a warning for each name,
        if the context is true."""
        if not isinstance(given, dict):
            return given
        kept = without_null(given)
        for name in kept.keys() - cls.model_fields.keys():
            is_neutral = name in IGNORED or kept[name] in NEUTRAL.get(name, ())
            if not is_neutral and info.context and warn_of.cache_info().currsize < MAX_WARNINGS:
                warn_of(name[:60])
            if is_neutral or info.context:  # else pydantic decides
                del kept[name]
        return kept


B = TypeVar("B", bound=Body)


@functools.cache
def warn_of(name: str) -> None:
    """Warns of an unknown field, once for each name."""
    log.warning("the field %r is ignored: this server does not know it", name)


def checked(kind: type[B], content: Any, *, lenient: bool = False) -> B:
    """The content as a model; unknown fields are refused, or if `lenient` ignored with a warning.
    Raises `InputError` for the first thing that is wrong."""
    try:
        return kind.model_validate(content, context=lenient)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        raise cause
    words = problem["msg"].replace("Input should be", "it must be").removeprefix("Value error, ")
    advice = ADVICE.get(problem["type"], words)
    place = ""
    for step in problem["loc"]:
        place += f"[{step}]" if isinstance(step, int) else f".{step}"
        if step == "[key]" or isinstance(content, str):
            break
        content = content.get(step) if isinstance(content, dict) else content[step]
        if step in ADVICE and problem["type"] != "extra_forbidden":
            advice = ADVICE[step]
            break
    got = "missing" if content is None else shorten(repr(content), 60)
    raise InputError(f"{shorten(place[1:], 60)} is {got}; {advice}")


class Part(Body, extra="ignore"):
    """Part of a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class CalledFunction(Body, extra="ignore"):
    """Name and arguments of a call."""

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

    role: str = Field(min_length=1)
    content: Annotated[str | Many[Part], AfterValidator(joined)] = ""
    """A text, or parts of type text; may be left out by the role assistant."""
    name: Any = None
    """Ignored."""
    reasoning_content: str = ""
    """Thinking of the role assistant."""
    tool_calls: Many[ToolCall] = ()
    """Calls by the role assistant."""
    tool_call_id: str = ""
    """Id of the call whose result a message of the role tool is."""

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        is_whole = "content" in self.model_fields_set and not self.tool_calls
        if self.role != "assistant" and not is_whole:
            raise ValueError("give a content; only the role assistant has tool_calls")
        return self


class Function(Body, extra="ignore"):
    """Function that an answer may call."""

    name: str = Field(pattern=NAME)
    description: str = ""
    parameters: Json = Field({"type": "object", "properties": {}})
    """JSON Schema of its arguments."""
    strict: bool = False
    """Refuse the request if arguments cannot be held to the whole schema."""


class Tool(Body, extra="ignore"):
    """Tool of a chat."""

    type: Literal["function"]
    function: Function


def choice_of(choice: object) -> object:
    """The name in a `tool_choice` that is an object; a word such as `auto` is returned as it is."""
    match choice:
        case {"type": "function", "function": {"name": name}} | {"type": "function", "name": name}:
            return name
    return choice


class Conversation(Body):
    """Messages of a chat, and which functions the answer may call."""

    messages: Many[Message] = ()
    """The conversation. Answers may have tool_calls, and messages of the role tool the tool_call_id
    of one."""
    continue_final_message: bool = False
    """Go on with the text of the last message."""
    tools: Many[Tool] = ()
    """Functions that the answer may call."""
    tool_choice: Annotated[str, BeforeValidator(choice_of, json_schema_input_type=str | Json)] = (
        "auto"
    )
    """Whether it calls some: auto, none, required, or the function to call."""
    parallel_tool_calls: bool = True
    """Whether it may call several."""

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if len({tool.function.name for tool in self.tools}) < len(self.tools):
            raise InputError("tools has two functions of one name; give each a name of its own")
        if self.tool_choice not in ("auto", "none"):
            if not self.callable_functions:
                refuse(self, "tool_choice", ADVICE["tool_choice"])
            if self.continue_final_message:
                refuse(self, "tool_choice", "leave it out for an answer that goes on")
        return self

    @property
    def callable_functions(self) -> dict[str, Function]:
        """Functions that may be called, by their names."""
        functions = {tool.function.name: tool.function for tool in self.tools}
        return {n: f for n, f in functions.items() if self.tool_choice in ("auto", "required", n)}
