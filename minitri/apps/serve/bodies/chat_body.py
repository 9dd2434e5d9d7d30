"""Messages and tools of a chat, as clients send them."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from minitri import InputError
from minitri.apps.serve.bodies.strict_json import Body, Json, Many, Says
from minitri.core.errors import shorten

NAME = r"\A(?!(auto|none|required)\Z)[a-zA-Z0-9_.-]{1,64}\Z"
"""A function's name, which is no value of `tool_choice`."""
CHOICES = "give auto, none, required, or a function that is in tools"


class Part(Body, extra="ignore"):
    """Part of a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: str


def parsed_arguments(text: Any) -> Json:
    """The object that a call's arguments are. Raises `ValueError`."""
    try:
        return {**json.loads(text)} if text != "" else {}
    except (TypeError, ValueError, RecursionError):
        raise ValueError("give an object of JSON as a text") from None


class CalledFunction(Body, extra="ignore"):
    """Name and arguments of a call."""

    name: str
    arguments: Annotated[Json, BeforeValidator(parsed_arguments, json_schema_input_type=str)]
    """An object of JSON, as a text."""


class ToolCall(Body, extra="ignore"):
    """Call of a function by an assistant."""

    id: str
    function: CalledFunction


class Message(Body):
    """Message of a chat."""

    role: str
    content: Annotated[
        str | Part | Many[str | Part], Says("give a text, or parts of type text")
    ] = ""
    """A text, or parts of type text; may be left out by the role assistant."""
    name: Any = None
    """Ignored."""
    reasoning_content: Any = None
    """Thinking of the role assistant."""
    tool_calls: Many[ToolCall] = ()
    """Calls by the role assistant."""
    tool_call_id: str | None = None
    """Id of the call whose result a message of the role tool is."""

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.role != "assistant" and self.tool_calls:
            raise ValueError("only the role assistant has tool_calls")
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError("give a content")
        return self


class Function(Body, extra="ignore"):
    """Function that an answer may call."""

    name: Annotated[
        str,
        Field(pattern=NAME),
        Says("give at most 64 letters, digits, _ . and -, and not auto, none or required"),
    ]
    description: str = ""
    parameters: Json | None = None
    """JSON Schema of its arguments."""
    strict: bool = False
    """Refuse the request if arguments cannot be held to the whole schema."""


class Tool(Body, extra="ignore"):
    """Tool of a chat."""

    type: Literal["function"]
    function: Function


class Conversation(Body):
    """Messages of a chat, and which functions the answer may call."""

    messages: Many[Message] = ()
    """The conversation. Answers may have tool_calls, and messages of the role tool the tool_call_id
    of one."""
    continue_final_message: bool = False
    """Go on with the text of the last message."""
    tools: Many[Tool] = ()
    """Functions that the answer may call."""
    tool_choice: Annotated[str | Json, Says(CHOICES)] = "auto"
    """Whether it calls some: auto, none, required, or the function to call."""
    parallel_tool_calls: bool = True
    """Whether it may call several."""

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = {tool.function.name for tool in self.tools}
        if len(names) < len(self.tools):
            raise InputError("tools has two functions of one name; give each a name of its own")
        if self.called not in {"auto", "none", *names, *["required"] * bool(names)}:
            raise InputError(f"tool_choice is {shorten(repr(self.tool_choice), 60)}; {CHOICES}")
        return self

    @property
    def called(self) -> str:
        """auto, none, required, or the name of the function to call; empty if it is another."""
        match self.tool_choice:
            case "auto" | "none" | "required" as choice:
                return choice
            case {"type": "function", "function": {"name": str(name)}}:
                return name
        return ""
