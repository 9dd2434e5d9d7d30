"""Body of /v1/responses: a chat in other words, of which nothing is stored."""

from typing import Annotated, Literal

from pydantic import Field

from minitri import Grammar, InputError
from minitri.apps.serve.bodies.chat_body import Conversation
from minitri.apps.serve.bodies.completion import Fields, Form
from minitri.apps.serve.bodies.strict_json import Body, Json, Many, checked, says
from minitri.core.errors import shorten


class TextForm(Body):
    """Form of the answer's text."""

    format: Form = None
    """An object of type text, json_object, or json_schema, with a schema."""


class ResponseBody(Fields):
    """Body of /v1/responses."""

    id_prefix = "resp_"
    object_type = "response"
    input: Annotated[str | Many[Json], says("give a text, or a list of items")] = ""
    """A text, or a list of items: messages of texts, calls of functions and what those gave;
    reasoning is left out."""
    instructions: str = ""
    """A message of the system, before the input."""
    text: TextForm = TextForm()
    """Form of the answer, such as {"format": {"type": "text"}}."""
    tools: Many[Json] = ()
    """Functions that may be called; tools of other types are left out."""
    tool_choice: Annotated[str | Json, says("give auto, none, required, or a function")] = "auto"
    """Whether functions are called: auto, none, required, or which one."""
    parallel_tool_calls: bool = True
    """Whether several may be called."""
    n: int = Field(1, ge=1, le=1)
    """How many answers."""
    details: Literal[False] = False
    """Events have none."""

    @property
    def forms(self) -> dict[str, Grammar]:
        form = self.text.format
        return super().forms | ({} if form is None else {"text": form})

    @property
    def conversation(self) -> Conversation:
        tools = [
            {"type": "function", "function": tool}
            for tool in self.tools
            if tool.get("type") == "function"
        ]
        content = {
            "messages": self._messages(),
            "tools": tools,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        return checked(Conversation, content)

    def _messages(self) -> list[Json]:
        """Messages of the chat; calls that follow one another are of one message."""
        items = self.input
        if isinstance(items, str):
            items = ({"role": "user", "content": items},)
        messages: list[Json] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in items:
            match item:
                case {"type": "reasoning"}:
                    pass
                case {"type": "function_call", "call_id": call_id, "name": name, "arguments": text}:
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant"})
                    call = {"id": call_id, "function": {"name": name, "arguments": text}}
                    messages[-1].setdefault("tool_calls", []).append(call)
                case {"type": "function_call_output", "call_id": call_id, "output": output}:
                    messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
                case {"role": role, "content": content} if item.get("type", "message") == "message":
                    messages.append({"role": role, "content": content})
                case _:
                    raise InputError(f"input has {shorten(repr(item), 60)}; give messages or calls")
        return messages
