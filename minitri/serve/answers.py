"""How an endpoint words its answer: OpenAI's JSON, whole or as a stream, of a run's events.

In addition to OpenAI's fields every answer has its `seed`; chunks of a stream with `details` have
the token's `origin` (`minitri.Token`), or `prompt_progress`, in the words of llama.cpp's server.
"""

import itertools
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from minitri import End, Engine, Event, Idle, Request, RowStats, Token
from minitri.requests import PrefillProgress
from minitri.serve.chats.answer_parser import AnswerParser, Piece
from minitri.serve.chats.chat_prompt import ChatPrompt
from minitri.serve.protocol import Asked

LEAST_LOGPROB = -9999.0
"""OpenAI's, for a token that is practically impossible: JSON knows no infinity."""
Json = dict[str, Any]


def to_json(content: Json, default: Callable[[Any], Json] | None = None) -> bytes:
    """UTF-8; what is no Unicode becomes a question mark, what is no JSON what `default` says."""
    return json.dumps(content, ensure_ascii=False, default=default).encode("utf-8", "replace")


def in_stream(content: bytes) -> bytes:
    """JSON as an event of a stream."""
    return b"data: %b\n\n" % content


class Writer:
    """The answer to one call."""

    def __init__(
        self,
        request: Request,
        asked: Asked,
        model: str,
        engine: Engine,
        chat: ChatPrompt | None = None,
    ) -> None:
        generation = request.generation
        self._chat = chat
        self._parser = chat.parser() if chat is not None else AnswerParser()
        self._pieces: list[Piece] = []
        self._num_calls = 0
        self._asked = asked
        self._tokenizer = engine.tokenizer
        self._ends = () if generation.ignore_eos else engine.config.eos_token_ids
        self._has_logprobs = generation.logprobs is not None
        kind = "text_completion"
        if asked.is_chat:
            kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        self.id = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}
        self._head["seed"] = request.seed
        self._tokens: list[Token] = []
        self._offset = 0  # characters so far
        self._speaker = {"role": "assistant"}  # is told once

    def take(self, event: Event) -> bytes:
        """What an event adds to the answer: nothing while its text is not certain."""
        is_stream = self._asked.stream
        has_details = is_stream and self._asked.details
        match event:
            case PrefillProgress(num_done=done, num_tokens=total, num_cached=cached) if has_details:
                progress = {"processed": done, "total": total, "cache": cached}
                return in_stream(self._json([], prompt_progress=progress))
            case Token() if not is_stream:
                self._tokens.append(event)
            case Token(text=text) if text or self._has_logprobs or has_details:
                return in_stream(self._json([self._choice(text, [event])]))
            case End(text=text, row_stats=stats) if not is_stream:
                return self._json([self._choice(text, self._tokens, event)], usage=usage(stats))
            case End(row_stats=stats):
                last = in_stream(self._json([self._choice("", [], event)]))
                if (self._asked.stream_options or {}).get("include_usage"):
                    last += in_stream(self._json([], usage=usage(stats)))
                return last + in_stream(b"[DONE]")
            case Idle() if is_stream:
                return b": waiting\n\n"
        return b""

    def _json(self, choices: list[Json], **others: Json) -> bytes:
        return to_json(self._head | {"choices": choices} | others, self._likeliest)

    def _choice(self, text: str, tokens: list[Token], end: End | None = None) -> Json:
        """A text, or a piece of it."""
        reason = end.finish_reason if end is not None else None
        choice = {
            "index": 0,
            "logprobs": self._logprobs(tokens) if self._has_logprobs and tokens else None,
            "finish_reason": "stop" if reason == "eos" else reason,
        }
        if self._asked.stream and self._asked.details and tokens:
            choice["origin"] = tokens[-1].origin
        if self._chat is not None:
            pieces = self._parser.push(text, is_last=end is not None)
            self._pieces += pieces
            choice["delta" if self._asked.stream else "message"] = self._said(pieces)
            if self._num_calls and reason in ("eos", "stop"):
                choice["finish_reason"] = "tool_calls"
            if end is not None:
                self._chat.keep(self._pieces, end)
        else:
            choice["text"] = text
        return choice

    def _said(self, pieces: Sequence[Piece]) -> Json:
        """Pieces of an answer as a message, or a part of one."""
        texts = {"content": ""}
        calls: dict[int, Json] = {}
        for kind, text in pieces:
            if kind == "call":
                self._num_calls += 1
                head = {"id": secrets.token_hex(5)[1:], "type": "function"}
                calls[self._num_calls - 1] = head | {"function": {"name": text, "arguments": ""}}
            elif kind == "arguments":
                call = calls.setdefault(self._num_calls - 1, {"function": {"arguments": ""}})
                call["function"]["arguments"] += text
            else:
                name = "reasoning_content" if kind == "reasoning" else kind
                texts[name] = texts.get(name, "") + text
        said: Json = self._speaker | texts
        self._speaker = {}
        if calls:
            said["content"] = said["content"] or None
            said["tool_calls"] = [*calls.values()]
            if self._asked.stream:
                said["tool_calls"] = [{"index": index} | it for index, it in calls.items()]
        return said

    def _logprobs(self, tokens: list[Token]) -> Json:
        """Of the tokens, but for one that ends the text and is not part of it. What is said of the
        likeliest ones is made while JSON is written, between which other threads run."""
        tokens = [token for token in tokens if token.token_id not in self._ends]
        if self._asked.is_chat:
            return {"content": tokens}
        own = [self._named(token.token_id, token.logprob) for token in tokens]
        lengths = (len(token.text) for token in tokens)
        *offsets, self._offset = itertools.accumulate(lengths, initial=self._offset)
        return {
            "tokens": [entry["token"] for entry in own],
            "token_logprobs": [entry["logprob"] for entry in own],
            "top_logprobs": tokens,
            "text_offset": offsets,
        }

    def _likeliest(self, token: Token) -> Json:
        """Those at the place of a token, in a chat with itself."""
        tops = [self._named(*pair) for pair in token.top_logprobs]
        if self._asked.is_chat:
            return self._named(token.token_id, token.logprob) | {"top_logprobs": tops}
        return {it["token"]: it["logprob"] for it in tops}

    def _named(self, token_id: int, logprob: float | None) -> Json:
        """A token as text and, unless it is a part of a character, in UTF-8."""
        spelling = self._tokenizer.token(token_id) or ""
        text = self._tokenizer.decode([token_id])
        is_part = "\ufffd" in text
        if is_part or not text or "▁" in spelling:
            text = spelling.replace("▁", " ")
        utf8 = None if is_part else list(text.encode())
        return {"token": text, "logprob": max(logprob or 0.0, LEAST_LOGPROB), "bytes": utf8}


def usage(stats: RowStats) -> Json:
    """Counts of tokens; accepted predictions are those that the target itself did not choose."""
    guessed = sum(stats.by_origin.get(origin, 0) for origin in ("draft", "retrieval"))
    return {
        "prompt_tokens": stats.num_prompt_tokens,
        "completion_tokens": stats.num_generated_tokens,
        "total_tokens": stats.num_prompt_tokens + stats.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.num_cached_tokens},
        "completion_tokens_details": {"accepted_prediction_tokens": guessed},
    }
