"""Answers of /v1/responses: a list of items, messages and calls of functions.

A stream sends it piece by piece, as numbered events.
"""

import secrets
from collections.abc import Iterator
from typing import Any

from minitri import End, Engine, Event, Idle, Token
from minitri.apps.serve.answers import Writer, in_stream, to_json
from minitri.apps.serve.api_error import ApiError
from minitri.apps.serve.bodies.response_body import ResponseBody
from minitri.apps.serve.bodies.strict_json import Json
from minitri.apps.serve.protocol import Call

ITEMS: dict[str, tuple[str, str, Json]] = {
    "reasoning_content": ("reasoning", "reasoning_text", {"summary": []}),
    "content": ("message", "output_text", {"role": "assistant"}),
}
"""By the keys of a chat's message: types of an item and of its only part, and its other fields."""


class ResponseWriter(Writer):
    """Answer to one call."""

    def __init__(self, call: Call, model: str, engine: Engine) -> None:
        super().__init__(call, model, engine)
        asked = call.asked
        assert isinstance(asked, ResponseBody)
        self.id = f"resp_{secrets.token_hex(12)}"
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": self._head["created"],
            "model": model,
            "seed": call.requests[0].seed,
            "tools": asked.tools,
            "tool_choice": asked.tool_choice,
            "parallel_tool_calls": asked.parallel_tool_calls,
        }
        self._status = "in_progress"
        self._items: list[Json] = []
        self._number = 0  # of the next event

    def take(self, index: int, event: Event) -> bytes:
        events = b"".join(self._events(index, event))
        if self._asked.stream:
            return events
        return to_json(self._response()) if isinstance(event, End) else b""

    def fail(self, error: ApiError) -> bytes:
        self._status = "failed"
        problem = {"code": "server_error", "message": str(error)}
        return self._event("failed", response=self._response() | {"error": problem})

    def _events(self, index: int, event: Event) -> Iterator[bytes]:
        """Events of a stream that an event of the text brings about."""
        choice = self._choices[index]
        is_stream = self._asked.stream
        if not self._number:
            for kind in ("created", "in_progress"):
                yield self._event(kind, response=self._response())
        match event:
            case Token(text=text) if is_stream:
                yield from self._add(choice.piece(text, [event])["delta"])
            case End(text=text):
                self._ends[index] = event
                piece = choice.piece("" if is_stream else text, [], event)
                yield from self._add(piece["delta" if is_stream else "message"])
                self._status = "incomplete" if event.finish_reason == "length" else "completed"
                yield from self._close(self._status)
                yield self._event(self._status, response=self._response())
            case Idle():
                yield b": waiting\n\n"

    def _response(self) -> Json:
        """All of the answer so far."""
        counts = None
        if self._ends:
            usage = self._usage()
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            counts = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
        cut = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        state = {"status": self._status, "error": None, "incomplete_details": cut}
        return self._head | state | {"usage": counts, "output": self._items}

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Next event of a stream."""
        name = f"response.{kind}"
        content = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\n" % name.encode() + in_stream(to_json(content))

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """Event about the latest item."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **place, content_index=0, **fields)

    def _add(self, message: Json) -> Iterator[bytes]:
        """Events about a part of a chat's message."""
        for name, (kind, part, others) in ITEMS.items():
            if text := message.get(name):
                if not self._items or self._items[-1]["type"] != kind:
                    yield from self._open(kind, content=[], **others)
                    content = {"type": part, "text": "", "annotations": [], "logprobs": []}
                    self._items[-1]["content"] += [content]
                    yield self._item_event("content_part.added", part=content)
                self._items[-1]["content"][0]["text"] += text
                yield self._item_event(f"{part}.delta", delta=text, logprobs=[])
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if "id" in call:
                head = {"call_id": call["id"], "name": function["name"], "arguments": ""}
                yield from self._open("function_call", **head)
            if text := function.get("arguments"):
                self._items[-1]["arguments"] += text
                yield self._item_event("function_call_arguments.delta", delta=text)

    def _open(self, kind: str, **fields: Any) -> Iterator[bytes]:
        """Begins an item."""
        yield from self._close("completed")
        item = {"id": f"{kind}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        self._items.append(item | fields)
        yield self._item_event("output_item.added", item=self._items[-1])

    def _close(self, status: str) -> Iterator[bytes]:
        """Ends the latest item, if there is one."""
        if not self._items:
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            call = {"arguments": item["arguments"], "name": item["name"]}
            yield self._item_event("function_call_arguments.done", **call)
        else:
            [part] = item["content"]
            yield self._item_event(f"{part['type']}.done", text=part["text"], logprobs=[])
            yield self._item_event("content_part.done", part=part)
        yield self._item_event("output_item.done", item=item)
