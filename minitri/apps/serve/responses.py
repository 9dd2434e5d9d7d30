"""Answers of /v1/responses: a list of items, messages and calls of functions.

A stream sends it piece by piece, as numbered events.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from minitri import End, Event, Token
from minitri.apps.cli.report import Json, json_line
from minitri.apps.serve import answers
from minitri.apps.serve.api_error import ApiError
from minitri.apps.serve.chats.answer_parser import AnswerParser, Piece
from minitri.apps.serve.protocol import Call, Protocol

ITEMS: dict[str, tuple[str, str, Json]] = {
    "reasoning_content": ("reasoning", "reasoning_text", {"summary": []}),
    "content": ("message", "output_text", {"role": "assistant"}),
}
"""By the kinds of a chat's pieces: types of an item and of its only part, and its other fields."""


class ResponseWriter(answers.Writer):
    """Writes the answer to one call of /v1/responses, of one text."""

    def __init__(self, call: Call, protocol: Protocol) -> None:
        super().__init__(call, protocol)
        self._items: list[Json] = []
        self._number = 0  # of the next event
        self._head |= {  # the response so far
            "created_at": self._head["created"],
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "output": self._items,
            **call.asked.model_dump(include={"tools", "tool_choice", "parallel_tool_calls"}),
        }

    def take(self, number: int, event: Event) -> bytes:
        events = b"".join(self._events(self._parsers[number], event))
        if self._asked.stream:
            return events or answers.ALIVE
        return json_line(self._head).encode() if isinstance(event, End) else b""

    def fail(self, error: ApiError) -> bytes:
        problem = {"code": "server_error", "message": str(error)}
        self._head |= {"status": "failed", "error": problem}
        return self._event("failed")

    def _events(self, parser: AnswerParser, event: Event) -> Iterator[bytes]:
        """Makes the stream's events that follow from one event of the text."""
        if not self._number:
            yield self._event("created")
            yield self._event("in_progress")
        if isinstance(event, Token):
            yield from self._add(parser.push(event.text))
        elif isinstance(event, End):
            yield from self._add(parser.push("", is_last=True))
            self._ends[0] = event
            usage = {  # whose parts have other names than in a chat
                name.replace("prompt", "input").replace("completion", "output"): count
                for name, count in self._usage().items()
            }
            usage["input_tokens_details"] |= {"cache_write_tokens": 0}  # which clients require
            usage["output_tokens_details"] = {"reasoning_tokens": 0}
            status = "completed"
            if event.finish_reason == "length":
                status = "incomplete"
                self._head["incomplete_details"] = {"reason": "max_output_tokens"}
            self._head |= {"status": status, "usage": usage}
            yield from self._close(status)
            yield self._event(status)

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Makes the next event of the stream, by default about the whole response."""
        content = {"type": f"response.{kind}", "sequence_number": self._number}
        content |= fields or {"response": self._head}
        self._number += 1
        return b"event: response.%b\n" % kind.encode() + answers.in_stream(content)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """Makes an event of the stream about the latest item."""
        index = len(self._items) - 1
        item_id = self._items[index]["id"]
        return self._event(kind, item_id=item_id, content_index=0, output_index=index, **fields)

    def _add(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        """Makes the events of the stream about parsed pieces of the answer."""
        for piece, text, name in pieces:
            if piece == "call":
                call_id = answers.new_id("call_")
                yield from self._open("function_call", call_id=call_id, name=name, arguments="")
                self._items[-1]["arguments"] = text
                yield self._item_event("function_call_arguments.delta", delta=text)
                yield self._item_event("function_call_arguments.done", arguments=text, name=name)
            else:
                kind, part, others = ITEMS[piece]
                if not self._items or self._items[-1]["type"] != kind:
                    yield from self._open(kind, content=[], **others)
                    content = {"type": part, "text": "", "annotations": [], "logprobs": []}
                    self._items[-1]["content"].append(content)
                    yield self._item_event("content_part.added", part=content)
                self._items[-1]["content"][0]["text"] += text
                yield self._item_event(f"{part}.delta", delta=text, logprobs=[])

    def _open(self, kind: str, **fields: Any) -> Iterator[bytes]:
        """Begins an item of the response: a message, or a call."""
        yield from self._close("completed")
        item = {"id": answers.new_id(f"{kind}_"), "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        yield self._item_event("output_item.added", item=item)

    def _close(self, status: str) -> Iterator[bytes]:
        """Ends the latest item of the response, if there is one."""
        for item in self._items[-1:]:
            item["status"] = status
            for part in item.get("content", ()):
                yield self._item_event(f"{part['type']}.done", text=part["text"], logprobs=[])
                yield self._item_event("content_part.done", part=part)
            yield self._item_event("output_item.done", item=item)
