"""Answers of the endpoints in OpenAI's JSON, whole or as a stream, made of a run's events.

In addition to OpenAI's fields every answer has its `seed`; with `details` the chunks of a stream
have the `origin` of a token (`minitri.Token`), or `prompt_progress`, in the words of llama.cpp.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from minitri import End, Event, Idle, PrefillProgress, Token
from minitri.apps.cli.report import Json, json_line
from minitri.apps.serve.api_error import ApiError
from minitri.apps.serve.chats.answer_parser import AnswerParser
from minitri.apps.serve.protocol import Call, Protocol

LEAST_LOGPROB = -9999.0  # OpenAI's number for an impossible token: JSON has no infinity
ALIVE = b": still at work\n\n"  # a comment, so that no client takes a stream for dead


def in_stream(content: Json) -> bytes:
    """An object of JSON as one server-sent event."""
    return f"data: {json_line(content)}\n\n".encode()


def new_id(prefix: str) -> str:
    """A random id with a prefix, as OpenAI's have one."""
    return prefix + secrets.token_hex(12)


class Writer:
    """Writes the answer to one call, of one text or several, in OpenAI's JSON."""

    def __init__(self, call: Call, protocol: Protocol) -> None:
        asked = self._asked = call.asked
        self._engine = protocol.engine
        numbers = range(len(call.requests))  # of the texts, `choices` in OpenAI's JSON
        make_parser = call.chat.parser if call.chat else AnswerParser
        self._parsers = [make_parser() for _ in numbers]
        self._roles = [{"role": "assistant"} for _ in numbers]  # each until it is sent
        self._ends: list[Any] = [None for _ in numbers]  # `End`s
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
        """Takes an event of one text; returns the part of the answer that is complete, or b""."""
        asked = self._asked
        if isinstance(event, End):
            self._ends[number] = event
        is_done = None not in self._ends
        if not asked.stream:
            if not is_done:
                return b""
            ends = enumerate(self._ends)
            choices = [self._choice(n, end.text, end.tokens, end) for n, end in ends]
            return json_line({**self._head, "choices": choices, "usage": self._usage()}).encode()
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

    def fail(self, error: ApiError) -> bytes:
        """Last piece of a stream that has begun and cannot go on: the error."""
        return in_stream(error.content)

    def _chunk(self, *choices: Json, **others: Json) -> bytes:
        """Makes a piece of a streamed answer, a server-sent event."""
        return in_stream({**self._head, "choices": choices, **others})

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
        """JSON of a text, or of a part of it that is streamed."""
        asked = self._asked
        choice: Json = {"index": number, "logprobs": None}
        reason = end and end.finish_reason
        choice["finish_reason"] = "stop" if reason == "eos" else reason
        if asked.num_logprobs is not None and tokens:
            choice["logprobs"] = self._logprobs(tokens)
        if asked.stream and asked.details and tokens:
            choice["origin"] = tokens[-1].origin
        if not self._is_chat:
            return choice | {"text": text}
        message: Json = {**self._roles[number], "content": ""}
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

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        """Log-probabilities of tokens as JSON, without end-of-sequence tokens."""
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
        """A token as JSON: text, spelled out if it is a part of a character, and bytes."""
        tokenizer = self._engine.tokenizer
        spelling = tokenizer.token(token_id) or ""
        text = tokenizer.decode([token_id])
        if "\ufffd" in text or not text or "▁" in spelling:
            text = spelling.replace("▁", " ")
        utf8 = [*tokenizer.token_bytes(token_id)]
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": utf8}
