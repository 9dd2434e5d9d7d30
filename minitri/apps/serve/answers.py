"""Answers of the endpoints in OpenAI's JSON, whole or as a stream, made of a run's events.

In addition to OpenAI's fields every answer has its `seed`; with `details` the chunks of a stream
have the `origin` of a token (`minitri.Token`), or `prompt_progress`, in the words of llama.cpp.
"""

import itertools
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from minitri import End, Engine, Event, Idle, Request, Token
from minitri.apps.serve.api_error import ApiError
from minitri.apps.serve.bodies.completion import TextBody
from minitri.apps.serve.bodies.strict_json import Json
from minitri.apps.serve.chats.answer_parser import AnswerParser, Piece
from minitri.apps.serve.protocol import Call
from minitri.core.requests import PrefillProgress
from minitri.core.stats import LogProbs
from minitri.text.text_stream import IncrementalDecoder

LEAST_LOGPROB = -9999.0
"""OpenAI's number for a token that is practically impossible: JSON has no infinity."""
ALIVE = b": still at work\n\n"
"""Comment in a stream, so that no client or router takes it for dead."""


def to_json(content: Json) -> bytes:
    """JSON in UTF-8, where lone surrogates become question marks."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")


def in_stream(content: Json) -> bytes:
    """An object of JSON as one server-sent event."""
    return b"data: %b\n\n" % to_json(content)


def new_call_id() -> str:
    """A random id for a tool call: nine hexadecimal digits, which all chat templates accept."""
    return secrets.token_hex(5)[1:]


class Writer:
    """Answer to one call, of one text or several."""

    def __init__(self, call: Call, model: str, engine: Engine) -> None:
        asked = self._asked = call.asked
        self._choices = [
            Choice(index, request, call, engine) for index, request in enumerate(call.requests)
        ]
        self._ends: dict[int, End] = {}  # by the indices of their choices
        self.id = asked.id_prefix + secrets.token_hex(12)
        is_chunk = asked.stream and asked.object_type == "chat.completion"
        self._head: Json = {
            "id": self.id,
            "object": asked.object_type + ".chunk" * is_chunk,
            "created": int(time.time()),
            "model": model,
            "seed": call.requests[0].seed,
        }

    def take(self, index: int, event: Event) -> bytes:
        """Part of the answer that an event of one text completes; empty if there is none yet."""
        asked = self._asked
        choice = self._choices[index]
        if isinstance(event, End):
            self._ends[index] = event
        is_done = len(self._ends) == len(self._choices)
        if not asked.stream:
            return to_json(self._whole()) if is_done else b""
        match event:
            case Idle():
                return ALIVE
            case PrefillProgress(num_done=done, num_tokens=total, num_cached=cached):
                progress = {"processed": done, "total": total, "cache": cached}
                return self._chunk([], prompt_progress=progress) if asked.details else ALIVE
            case Token(text=text) if text or asked.details or asked.num_logprobs is not None:
                return self._chunk([choice.piece(text, [event])])
            case End():
                last = self._chunk([choice.piece("", [], event)])
                return last + self._tail() if is_done else last
        return b""

    def fail(self, error: ApiError) -> bytes:
        """End of a stream that has begun and cannot go on."""
        return in_stream(error.content)

    def _chunk(self, choices: list[Json], **others: Json) -> bytes:
        """Piece of a stream."""
        return in_stream({**self._head, "choices": choices, **others})

    def _tail(self) -> bytes:
        """The last events of a stream: token counts, if asked for, and [DONE]."""
        has_usage = self._asked.stream_options.include_usage
        usage = self._chunk([], usage=self._usage()) if has_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _whole(self) -> Json:
        """All of the answer."""
        choices = []
        for index, choice in enumerate(self._choices):
            first = self._ends[index - index % self._asked.n]  # after the same prompt
            choices.append(choice.whole(self._ends[index], first.prompt_scores))
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _usage(self) -> Json:
        """Counts of tokens. A prompt with several texts counts once; accepted predictions are the
        tokens that the target itself did not choose."""
        rows = [self._ends[index].row_stats for index in range(len(self._choices))]
        first_rows = rows[:: self._asked.n]  # one for each prompt
        num_prompt = sum(row.num_prompt_tokens for row in first_rows)
        num_cached = sum(row.num_cached_tokens for row in first_rows)
        num_new = sum(row.num_generated_tokens for row in rows)
        guessed = sum(row.by_origin["draft"] + row.by_origin["retrieval"] for row in rows)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "completion_tokens_details": {
                "accepted_prediction_tokens": guessed,
                "reasoning_tokens": 0,
            },
        }


class Choice:
    """One text of an answer."""

    def __init__(self, index: int, request: Request, call: Call, engine: Engine) -> None:
        self._index = index
        self._asked = call.asked
        self._is_chat = call.chat is not None
        self.parser = call.chat.parser() if call.chat is not None else AnswerParser()
        self._num_calls = 0
        assert not isinstance(request.prompt, str)
        self._prompt = request.prompt
        self._tokenizer = engine.tokenizer
        is_ended = not request.generation.ignore_eos
        self._end_tokens = engine.config.eos_token_ids if is_ended else ()
        self._num_characters = 0
        self._has_role = False  # the message so far

    def whole(self, end: End, prompt_scores: Sequence[LogProbs]) -> Json:
        """All of the text, after the prompt if that is wanted."""
        text = end.text
        tokens = end.tokens
        if isinstance(self._asked, TextBody) and self._asked.echo:
            text = self._tokenizer.decode(self._prompt) + text
            decoder = IncrementalDecoder(self._tokenizer, [])
            scores: list[Any] = [(None, ()), *prompt_scores]  # none of the first token
            pairs = zip(self._prompt, scores, strict=False)
            echo = [
                Token(0, token, decoder.push(token), "prompt", *score) for token, score in pairs
            ]
            tokens = (*echo, *tokens)
        return self.piece(text, tokens, end)

    def piece(self, text: str, tokens: Sequence[Token], end: End | None = None) -> Json:
        """A text, or a part of it."""
        asked = self._asked
        choice: Json = {"index": self._index, "logprobs": None}
        if asked.num_logprobs is not None and tokens:
            choice["logprobs"] = self._logprobs(tokens)
        if asked.stream and asked.details and tokens:
            choice["origin"] = tokens[-1].origin
        if self._is_chat:
            pieces = self.parser.push(text, is_last=end is not None)
            choice["delta" if asked.stream else "message"] = self._message(pieces)
        else:
            choice["text"] = text
        reason = end.finish_reason if end is not None else None
        if reason in ("eos", "stop"):
            reason = "tool_calls" if self._num_calls else "stop"
        return choice | {"finish_reason": reason}

    def _message(self, pieces: Sequence[Piece]) -> Json:
        """Pieces as a part of a message; the first one has the role."""
        message: Json = {"content": ""}
        if not self._has_role:
            message["role"] = "assistant"
            self._has_role = True
        calls: list[Json] = []
        for kind, text in pieces:
            if kind == "call":
                head = {"index": self._num_calls, "id": new_call_id(), "type": "function"}
                calls.append({**head, "function": {"name": text, "arguments": ""}})
                self._num_calls += 1
            elif kind == "arguments":
                if not calls:  # more of a call in an earlier piece
                    calls.append({"index": self._num_calls - 1, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text
            else:
                message[kind] = message.get(kind, "") + text
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return message

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        """Log-probabilities of tokens, but for an end-of-sequence token that ends the text."""
        tokens = [
            token
            for token in tokens
            if token.origin == "prompt" or token.token_id not in self._end_tokens
        ]
        entries = [self._entry(token.token_id, token.logprob) for token in tokens]
        tops = [[self._entry(*pair) for pair in token.top_logprobs] for token in tokens]
        pairs = zip(entries, tops, strict=True)
        if self._is_chat:
            return {"content": [entry | {"top_logprobs": top} for entry, top in pairs]}
        lengths = (len(token.text) for token in tokens)
        *offsets, self._num_characters = itertools.accumulate(lengths, initial=self._num_characters)
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {other["token"]: other["logprob"] for other in top} or None for top in tops
            ],
            "text_offset": offsets,
        }

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        """Token as text and, unless it is a part of a character, in UTF-8."""
        spelling = self._tokenizer.token(token_id) or ""
        text = self._tokenizer.decode([token_id])
        is_part = "\ufffd" in text
        if is_part or not text or "▁" in spelling:
            text = spelling.replace("▁", " ")
        utf8 = None if is_part else list(text.encode())
        shown = None if logprob is None else max(logprob, LEAST_LOGPROB)
        return {"token": text, "logprob": shown, "bytes": utf8}
