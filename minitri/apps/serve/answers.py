"""Answers of the endpoints in OpenAI's JSON, whole or as a stream, made of a run's events.

An answer at /v1/responses is a list of items: thinking, messages and calls of functions. A stream
sends it piece by piece, as numbered events.
In addition to OpenAI's fields every answer has its `seed`; with `details` the chunks of a stream
have the `origin` of a token (`minitri.Token`), or `prompt_progress`, in the words of llama.cpp."""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from minitri import End, Event, Idle, PrefillProgress, Token
from minitri.apps.cli.report import Json, json_line
from minitri.apps.serve.chats.answer_parser import AnswerParser, Piece
from minitri.apps.serve.protocol import Asked, Call, ChatBody, Protocol, ResponseBody, TextBody

LEAST_LOGPROB = -9999.0  # OpenAI's number for an impossible token: JSON has no infinity
ALIVE = b": still at work\n\n"  # a comment of a stream, by which clients see that it lives
ITEMS: dict[str, Any] = {
    "reasoning_content": ("reasoning", "reasoning_text", {"summary": []}),
    "content": ("message", "output_text", {"role": "assistant"}),
}
"""By kind of `Piece`: types of its item and of the item's only part, the item's other fields."""


def in_stream(content: Json) -> bytes:
    """An object of JSON as one server-sent event."""
    return f"data: {json_line(content)}\n\n".encode()


def new_id(prefix: str) -> str:
    """A random id for an answer or a part of it, with a prefix as OpenAI's ids have one."""
    return prefix + secrets.token_hex(12)


class Writer:
    """Writes the answer to one call, of one text or several, in OpenAI's JSON."""

    def __init__(self, call: Call, protocol: Protocol) -> None:
        asked = self._asked = call.asked
        self._engine = protocol.engine
        self._parsers = [call.chat.parser() for _ in call.requests] if call.chat else []
        self._roles = [{"role": "assistant"} for _ in call.requests]  # each until it is sent
        self._ends: list[Any] = [None for _ in call.requests]  # `End`s
        self.id = new_id(asked.id_prefix)
        self._is_chat = asked.object_type == "chat.completion"
        self._head: Json = {
            "id": self.id,
            "object": asked.object_type + ".chunk" * (asked.stream and self._is_chat),
            "created": int(time.time()),
            "model": protocol.names[0],
            "seed": call.requests[0].seed,
        }

    def take(self, number: int, event: Event) -> bytes:
        """Takes an event of text `number`; returns bytes to send now, or none yet."""
        asked = self._asked
        if isinstance(event, End):
            self._ends[number] = event
        is_done = None not in self._ends
        if not asked.stream:
            if not is_done:
                return b""
            choices = [
                self._choice(n, end.text, end.tokens, end) for n, end in enumerate(self._ends)
            ]
            return json_line(self._head | {"choices": choices, "usage": self._usage()}).encode()
        match event:
            case PrefillProgress(_, done, total, cached) if asked.details:
                progress = {"processed": done, "total": total, "cache": cached}
                return self._chunk(prompt_progress=progress)
            case Idle() | PrefillProgress():
                return ALIVE
            case Token(text=text) if text or asked.details or asked.num_logprobs is not None:
                return self._chunk(self._choice(number, text, [event]))
            case End():
                last = self._chunk(self._choice(number, "", [], event))
                if is_done and asked.stream_options.include_usage:
                    last += self._chunk(usage=self._usage())
                return last + b"data: [DONE]\n\n" * is_done
        return b""

    def fail(self, error: Json) -> bytes:
        """Last piece of a stream that has begun and cannot go on: the error, in OpenAI's JSON."""
        return in_stream(error)

    def _chunk(self, *choices: Json, **others: Json) -> bytes:
        """A server-sent event with `choices` and other fields of a streamed answer."""
        return in_stream(self._head | {"choices": choices} | others)

    def _usage(self) -> Json:
        """Counts of tokens for the answer's `usage`; a prompt with several texts counts once."""
        rows = [end.row_stats for end in self._ends]
        first_rows = rows[:: self._asked.n]  # one for each prompt
        num_prompt = sum(row.num_prompt_tokens for row in first_rows)
        num_cached = sum(row.num_cached_tokens for row in first_rows)
        num_new = sum(row.num_generated_tokens for row in rows)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _choice(
        self, number: int, text: str, tokens: Sequence[Token], end: End | None = None
    ) -> Json:
        """OpenAI's choice `number`: a whole text, or a streamed part, the last one with `end`."""
        asked = self._asked
        reason = end and end.finish_reason
        choice: Json = {"index": number, "logprobs": self._logprobs(tokens)}
        choice["finish_reason"] = "stop" if reason == "eos" else reason
        if asked.stream and asked.details and tokens:
            choice["origin"] = tokens[-1].origin
        if not self._is_chat:
            return choice | {"text": text}
        message: Json = self._roles[number] | {"content": ""}
        self._roles[number] = {}
        calls: list[Json] = []
        for kind, part, name in self._parsers[number].push(text, is_last=end is not None):
            if kind == "call":
                call: Json = {"index": len(calls), "id": new_id("call_"), "type": "function"}
                calls.append(call | {"function": {"name": name, "arguments": part}})
            else:
                message[kind] = message.get(kind, "") + part
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
            choice["finish_reason"] = "length" if reason == "length" else "tool_calls"
        return choice | {"delta" if asked.stream else "message": message}

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        """Log-probabilities of tokens as JSON, without end-of-sequence tokens."""
        if self._asked.num_logprobs is None or not tokens:
            return None
        ends = () if self._asked.ignore_eos else self._engine.config.eos_token_ids
        entries = [
            self._entry(token.token_id, token.logprob or 0.0)
            | {"top_logprobs": [self._entry(*pair) for pair in token.top_logprobs]}
            for token in tokens
            if token.token_id not in ends
        ]
        if self._is_chat:
            return {"content": entries}
        tops = [
            {top["token"]: top["logprob"] for top in entry["top_logprobs"]} or None
            for entry in entries
        ]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": tops,
        }

    def _entry(self, token_id: int, logprob: float) -> Json:
        """A token as JSON: text (a part of a character by its spelling), logprob and bytes."""
        tokenizer = self._engine.tokenizer
        utf8 = tokenizer.token_bytes(token_id)
        text = utf8.decode("utf-8", "replace")
        if "\ufffd" in text:
            text = tokenizer.token(token_id) or text
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": [*utf8]}


class ResponseWriter(Writer):
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
            return events or ALIVE
        return json_line(self._head).encode() if isinstance(event, End) else b""

    def fail(self, error: Json) -> bytes:
        self._head |= {"status": "failed", "error": error["error"] | {"code": "server_error"}}
        return self._event("failed")

    def _events(self, parser: AnswerParser, event: Event) -> Iterator[bytes]:
        """Yields the stream's events for one event of the run, whose text `parser` splits."""
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
            usage["input_tokens_details"]["cache_write_tokens"] = 0  # which clients require
            usage["output_tokens_details"] = {"reasoning_tokens": 0}
            status = "completed"
            if event.finish_reason == "length":
                status = "incomplete"
                self._head["incomplete_details"] = {"reason": "max_output_tokens"}
            self._head |= {"status": status, "usage": usage}
            yield from self._close(status)
            yield self._event(status)

    def _event(self, kind: str, **fields: Any) -> bytes:
        """The stream's next event, `response.{kind}`, with `fields` or else the whole response."""
        content = {"type": f"response.{kind}", "sequence_number": self._number}
        content |= fields or {"response": self._head}
        self._number += 1
        return b"event: response.%b\n" % kind.encode() + in_stream(content)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """The stream's next event, `response.{kind}`, with `fields`, about the latest item."""
        index = len(self._items) - 1
        item_id = self._items[index]["id"]
        return self._event(kind, item_id=item_id, content_index=0, output_index=index, **fields)

    def _add(self, pieces: Sequence[Piece]) -> Iterator[bytes]:
        for piece, text, name in pieces:
            if piece == "call":
                call_id = new_id("call_")
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
        """Yields events that end the latest item and begin one of type `kind`, with `fields`."""
        yield from self._close("completed")
        item = {"id": new_id(f"{kind}_"), "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        yield self._item_event("output_item.added", item=item)

    def _close(self, status: str) -> Iterator[bytes]:
        """Yields the events that end the latest item, if there is one, with this status."""
        for item in self._items[-1:]:
            item["status"] = status
            for part in item.get("content", ()):
                yield self._item_event(f"{part['type']}.done", text=part["text"], logprobs=[])
                yield self._item_event("content_part.done", part=part)
            yield self._item_event("output_item.done", item=item)


ENDPOINTS: dict[str, tuple[type[Asked], type[Writer]]] = {  # body and writer, by path
    "/v1/completions": (TextBody, Writer),
    "/v1/chat/completions": (ChatBody, Writer),
    "/v1/responses": (ResponseBody, ResponseWriter),
}
