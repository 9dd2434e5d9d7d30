"""OpenAI's newer endpoint /v1/responses: a chat in other words, of which nothing is stored.

A request becomes the body of a chat. An answer is a list of items, messages and calls of functions,
which a stream tells of piece by piece, by numbered events.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minitri import End, Engine, Event, Idle, InputError, Request, Token
from minitri.apps.serve.access import ApiError
from minitri.apps.serve.answers import Json, Writer, in_stream, to_json, usage
from minitri.apps.serve.chats.chat_prompt import ChatPrompt
from minitri.apps.serve.protocol import ChatFields, Fields
from minitri.core.errors import shorten
from minitri.core.fields import between, refuse

TEXTS = ("input_text", "output_text")
"""Types of parts that are texts."""
ITEMS: dict[str, tuple[str, str, Json]] = {
    "reasoning_content": ("reasoning", "reasoning_text", {"summary": []}),
    "content": ("message", "output_text", {"role": "assistant"}),
}
"""By what a message of a chat tells: types of an item and its only part, and what else it has."""


@dataclass(frozen=True)
class ResponseFields(Fields):
    """Those of /v1/responses."""

    is_chat = True
    input: Any = ""
    """A text, or a list of items: messages of texts, calls of functions and what those gave;
    reasoning is left out."""
    instructions: str = ""
    """A message of the system, before the input."""
    max_output_tokens: int | None = between(None, 1)
    """Most tokens of the answer. Default: as many as the context has room for."""
    text: Any = None
    """Its form, such as {"format": {"type": "text"}}."""
    tools: Any = ()
    """Functions that may be called; tools of other types are left out."""
    tool_choice: Any = None
    """Whether functions are called: auto, none, required, or which one."""
    parallel_tool_calls: bool | None = None
    """Whether several may be called. Default: true."""
    n: int = between(1, 1, 1)
    """How many answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.details:
            refuse(self, "details", "events have none; leave it out")
        match self.text or None:
            case None:
                form = self.response_format
            case {"format": {"type": "json_schema", "schema": _} as form, **others} if not others:
                form = nested(form, "json_schema")
            case {"format": {"type": "text" | "json_object"} as form, **others} if not others:
                pass
            case _:
                refuse(self, "text", "give a format: text, json_object, json_schema with a schema")
        object.__setattr__(self, "response_format", form)
        if not isinstance(self.input, str | list):
            refuse(self, "input", "give a text, or a list of items")
        tools = self.tools if isinstance(self.tools, list | tuple) else [None]
        if not all(isinstance(it, dict) for it in tools):
            refuse(self, "tools", "it must be a list of objects with a type")

    def as_chat(self) -> Json:
        shared = (vars(ChatFields()).keys() & vars(Fields()).keys()) - {"stream", "stream_options"}
        chat: Json = {name: getattr(self, name) for name in shared}
        chat |= {"messages": self._messages(), "max_completion_tokens": self.max_output_tokens}
        tools = [nested(it, "function") for it in self.tools if it.get("type") == "function"]
        is_by_name = isinstance(self.tool_choice, dict)
        choice = nested(self.tool_choice, "function") if is_by_name else self.tool_choice
        chat |= {"tools": tools, "parallel_tool_calls": self.parallel_tool_calls}
        return chat | {"tool_choice": choice}

    def _messages(self) -> list[Json]:
        """Those of a chat; calls that follow one another are of one message."""
        is_text = isinstance(self.input, str)
        found: list[Json] = []
        if self.instructions:
            found.append({"role": "system", "content": self.instructions})
        for item in [{"role": "user", "content": self.input}] if is_text else self.input:
            match item:
                case {"type": "reasoning"}:
                    pass
                case {"type": "function_call", "call_id": call_id, "name": name, "arguments": text}:
                    if not found or found[-1]["role"] != "assistant":
                        found.append({"role": "assistant"})
                    call = {"name": name, "arguments": text}
                    calls = found[-1].setdefault("tool_calls", [])
                    calls.append({"id": call_id, "type": "function", "function": call})
                case {"type": "function_call_output", "call_id": call_id, "output": output}:
                    content = as_parts(output)
                    found.append({"role": "tool", "tool_call_id": call_id, "content": content})
                case {"role": str(role), "content": content} if item.get("type") in (
                    None,
                    "message",
                ):
                    found.append({"role": role, "content": as_parts(content)})
                case _:
                    raise InputError(f"input has {shorten(repr(item), 60)}; give messages or calls")
        return found


def nested(fields: Mapping[str, Any], kind: str) -> Json:
    """What an object with a type says, as a chat has it: below that type."""
    return {"type": kind, kind: {name: it for name, it in fields.items() if name != "type"}}


def as_parts(content: Any) -> Any:
    """A content, as a chat has it."""
    if not isinstance(content, list):
        return content
    texts = [isinstance(it, dict) and it.get("type") in TEXTS for it in content]
    pairs = zip(content, texts, strict=True)
    return [{"type": "text", "text": it.get("text")} if is_text else it for it, is_text in pairs]


class ResponseWriter(Writer):
    """The answer to one call."""

    def __init__(
        self,
        requests: Sequence[Request],
        asked: ResponseFields,
        model: str,
        engine: Engine,
        chat: ChatPrompt | None = None,
    ) -> None:
        super().__init__(requests, asked, model, engine, chat)
        self.id = f"resp_{secrets.token_hex(12)}"
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": self._head["created"],
            "model": model,
            "seed": requests[0].seed,
            "tools": [*asked.tools],
            "tool_choice": asked.tool_choice or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
        }
        self._items: list[Json] = []
        self._number = 0  # of the next event

    def take(self, index: int, event: Event) -> bytes:
        choice = self._choices[index]
        is_stream = self._asked.stream
        told = b""
        if not self._number:
            for kind in ("created", "in_progress"):
                told += self._event(kind, response=self._response("in_progress"))
        match event:
            case Token(text=text) if is_stream:
                told += self._add(choice.piece(0, text, [event])["delta"])
            case End(text=text):
                self._ends[index] = event
                status = "incomplete" if event.finish_reason == "length" else "completed"
                piece = choice.piece(0, "" if is_stream else text, [], event)
                told += self._add(piece["delta" if is_stream else "message"]) + self._close(status)
                response = self._response(status)
                told += self._event(status, response=response)
                return told if is_stream else to_json(response)
            case Idle():
                told += b": waiting\n\n"
        return told if is_stream else b""

    def fail(self, error: ApiError) -> bytes:
        told = {"code": "server_error", "message": str(error)}
        return self._event("failed", response=self._response("failed") | {"error": told})

    def _response(self, status: str) -> Json:
        """All of the answer so far."""
        counts = None
        if self._ends:
            told = usage(self._groups(), self._asked)
            cached = told["prompt_tokens_details"]["cached_tokens"]
            counts = {
                "input_tokens": told["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": told["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": told["total_tokens"],
            }
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        now = {"status": status, "error": None, "incomplete_details": cut, "usage": counts}
        return {**self._head, **now, "output": self._items}

    def _event(self, kind: str, **fields: Any) -> bytes:
        """The next event of a stream."""
        name = f"response.{kind}"
        content = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\n" % name.encode() + in_stream(to_json(content))

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        """An event about the latest item."""
        item = self._items[-1]
        where = {"item_id": item["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._event(kind, **where, **fields)

    def _add(self, said: Json) -> bytes:
        """Events about what a chat tells of its message."""
        told = b""
        for name, (kind, part, own) in ITEMS.items():
            if text := said.get(name):
                if not self._items or self._items[-1]["type"] != kind:
                    told += self._open(kind, content=[], **own)
                    content = {"type": part, "text": "", "annotations": [], "logprobs": []}
                    self._items[-1]["content"] += [content]
                    told += self._of_item("content_part.added", part=content)
                self._items[-1]["content"][0]["text"] += text
                told += self._of_item(f"{part}.delta", delta=text, logprobs=[])
        for call in said.get("tool_calls") or ():
            function = call["function"]
            if "id" in call:
                own = {"call_id": call["id"], "name": function["name"], "arguments": ""}
                told += self._open("function_call", **own)
            if text := function.get("arguments"):
                self._items[-1]["arguments"] += text
                told += self._of_item("function_call_arguments.delta", delta=text)
        return told

    def _open(self, kind: str, **fields: Any) -> bytes:
        """Begins an item."""
        told = self._close("completed")
        item = {"id": f"{kind}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        self._items.append(item | fields)
        return told + self._of_item("output_item.added", item=self._items[-1])

    def _close(self, status: str) -> bytes:
        """Ends the latest item, if there is one."""
        if not self._items:
            return b""
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            own = {"arguments": item["arguments"], "name": item["name"]}
            told = self._of_item("function_call_arguments.done", **own)
        else:
            [part] = item["content"]
            told = self._of_item(f"{part['type']}.done", text=part["text"], logprobs=[])
            told += self._of_item("content_part.done", part=part)
        return told + self._of_item("output_item.done", item=item)
