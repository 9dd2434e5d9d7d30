"""Answers of the endpoints in OpenAI's JSON, whole or as a stream, made of a run's events.

In addition to OpenAI's fields every answer has its `seed`; with `details` the chunks of a stream
have the `origin` of a token (`minitri.Token`), or `prompt_progress`, in the words of llama.cpp.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from minitri import End, Engine, Event, Idle, PrefillProgress, Token
from minitri.apps.cli.report import Json, json_line
from minitri.apps.serve.api_error import ApiError
from minitri.apps.serve.chats.answer_parser import AnswerParser, Piece
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
        self._choices = [Choice(n, call, protocol.engine) for n in range(len(call.requests))]
        self._ends: dict[int, End] = {}  # by the indices of their choices
        self.id = new_id(asked.id_prefix)
        is_chunk = asked.stream and asked.object_type == "chat.completion"
        self._head: Json = {
            "id": self.id,
            "object": asked.object_type + ".chunk" * is_chunk,
            "created": int(time.time()),
            "model": protocol.names[0],
            "seed": call.requests[0].seed,
        }

    def take(self, index: int, event: Event) -> bytes:
        """Takes an event of one text; returns the part of the answer that is complete, or b""."""
        asked = self._asked
        choice = self._choices[index]
        if isinstance(event, End):
            self._ends[index] = event
        is_done = len(self._ends) == len(self._choices)
        if not asked.stream:
            if not is_done:
                return b""
            ends = sorted(self._ends.items())
            choices = [self._choices[n].piece(end.text, end.tokens, end) for n, end in ends]
            return json_line({**self._head, "choices": choices, "usage": self._usage()}).encode()
        match event:
            case PrefillProgress(_, done, total, cached) if asked.details:
                progress = {"processed": done, "total": total, "cache": cached}
                return self._chunk(prompt_progress=progress)
            case Idle() | PrefillProgress():
                return ALIVE
            case Token(text=text) if text or asked.details or asked.num_logprobs is not None:
                return self._chunk(choice.piece(text, [event]))
            case End():
                last = self._chunk(choice.piece("", [], event))
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
        """Counts of tokens for the answer's `usage`; a prompt with several texts counts once.
        Accepted predictions are the tokens that the target itself did not choose."""
        rows = [end.row_stats for _, end in sorted(self._ends.items())]
        first_rows = rows[:: self._asked.n]  # one for each prompt
        num_prompt = sum(row.num_prompt_tokens for row in first_rows)
        num_cached = sum(row.num_cached_tokens for row in first_rows)
        num_new = sum(row.num_generated_tokens for row in rows)
        guessed = sum(row.by_origin["draft"] + row.by_origin["retrieval"] for row in rows)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": {"accepted_prediction_tokens": guessed},
        }


@dataclass
class Choice:
    """State of one of the texts of an answer, a `choice` in OpenAI's JSON."""

    index: int
    call: Call
    engine: Engine

    def __post_init__(self) -> None:
        self.parser = self.call.chat.parser() if self.call.chat else AnswerParser()
        self._role: Json = {"role": "assistant"}  # until it is sent

    def piece(self, text: str, tokens: Sequence[Token], end: End | None = None) -> Json:
        """JSON of a text, or of a part of it that is streamed."""
        asked = self.call.asked
        choice: Json = {"index": self.index, "logprobs": None}
        if asked.num_logprobs is not None and tokens:
            choice["logprobs"] = self._logprobs(tokens)
        if asked.stream and asked.details and tokens:
            choice["origin"] = tokens[-1].origin
        message: Json = {}
        if self.call.chat:
            message = self._message(self.parser.push(text, is_last=end is not None))
            choice["delta" if asked.stream else "message"] = message
        else:
            choice["text"] = text
        reason = end and end.finish_reason
        if reason in ("eos", "stop"):
            reason = "tool_calls" if "tool_calls" in message else "stop"
        return choice | {"finish_reason": reason}

    def _message(self, pieces: Sequence[Piece]) -> Json:
        """Pieces of an answer as a chat message, or a part of one; the first has the role."""
        message = {**self._role, "content": ""}
        self._role = {}
        calls: list[Json] = []
        for kind, text, name in pieces:
            if kind == "call":
                call: Json = {"index": len(calls), "id": new_id("call_"), "type": "function"}
                calls.append(call | {"function": {"name": name, "arguments": text}})
            else:
                message[kind] = message.get(kind, "") + text
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return message

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        """Log-probabilities of tokens as JSON, without end-of-sequence tokens."""
        ends = () if self.call.asked.ignore_eos else self.engine.config.eos_token_ids
        entries = [
            self._entry(token.token_id, token.logprob or 0.0)
            | {"top_logprobs": [self._entry(*pair) for pair in token.top_logprobs]}
            for token in tokens
            if token.token_id not in ends
        ]
        if self.call.chat:
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
        tokenizer = self.engine.tokenizer
        spelling = tokenizer.token(token_id) or ""
        text = tokenizer.decode([token_id])
        if "\ufffd" in text or not text or "▁" in spelling:
            text = spelling.replace("▁", " ")
        utf8 = [*tokenizer.token_bytes(token_id)]
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": utf8}
