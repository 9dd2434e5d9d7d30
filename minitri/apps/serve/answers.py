"""Answers of the endpoints in OpenAI's JSON, whole or as a stream, made of a run's events.

In addition to OpenAI's fields every answer has its `seed`, and of several each its own; with
`details` the chunks of a stream have the `origin` of a token (`minitri.Token`), or
`prompt_progress`, in the words of llama.cpp's server.
"""

import itertools
import json
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minitri import End, Engine, Event, Request, Token
from minitri.apps.serve.api_error import ApiError
from minitri.apps.serve.bodies.strict_json import Json
from minitri.apps.serve.chats.answer_parser import AnswerParser, Piece
from minitri.apps.serve.protocol import Call
from minitri.core.requests import PrefillProgress
from minitri.core.stats import LogProbs
from minitri.text.text_stream import IncrementalDecoder

LEAST_LOGPROB = -9999.0
"""OpenAI's number for a token that is practically impossible: JSON has no infinity."""
PROMPT = "prompt"
"""Origin of a prompt's tokens."""


def to_json(content: Json) -> bytes:
    """UTF-8, where lone surrogates become question marks."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")


def in_stream(content: bytes) -> bytes:
    """JSON as an event of a stream."""
    return b"data: %b\n\n" % content


class Writer:
    """Answer to one call, of one text or several."""

    def __init__(self, call: Call, model: str, engine: Engine) -> None:
        asked = self._asked = call.asked
        self._choices = [
            Choice(index, request, call, engine) for index, request in enumerate(call.requests)
        ]
        self._ends: dict[int, End] = {}  # by the indices of their choices
        kind = "text_completion"
        if asked.is_chat:
            kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        self.id = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}
        self._head["seed"] = call.requests[0].seed

    def take(self, index: int, event: Event) -> bytes:
        """Part of the answer that an event of one text completes; empty if there is none yet."""
        asked = self._asked
        choice = self._choices[index]
        if isinstance(event, End):
            self._ends[index] = event
            is_last = len(self._ends) == len(self._choices)
            if asked.stream:
                chunk = self._chunk([choice.piece("", [], event)])
                return chunk + self._tail() if is_last else chunk
            return self._json(self._best(), usage=self._usage()) if is_last else b""
        if not asked.stream:
            return b""
        match event:
            case PrefillProgress(num_done=done, num_tokens=total, num_cached=cached):
                progress = {"processed": done, "total": total, "cache": cached}
                return self._chunk([], prompt_progress=progress) if asked.details else b""
            case Token(text=text):
                is_shown = text or asked.details or asked.num_logprobs is not None
                return self._chunk([choice.piece(text, [event])]) if is_shown else b""
        return b": waiting\n\n"  # Idle

    def fail(self, error: ApiError) -> bytes:
        """End of a stream that has begun and cannot go on."""
        return in_stream(to_json(error.content))

    def _tail(self) -> bytes:
        """End of a stream."""
        done = in_stream(b"[DONE]")
        if not self._asked.stream_options.include_usage:
            return done
        return in_stream(self._json([], usage=self._usage())) + done

    def _chunk(self, choices: list[Json], **others: Json | None) -> bytes:
        """Piece of a stream."""
        if self._asked.stream_options.include_usage:
            others["usage"] = None
        return in_stream(self._json(choices, **others))

    def _json(self, choices: list[Json], **others: Json | None) -> bytes:
        return to_json(self._head | {"choices": choices} | others)

    def _groups(self) -> list[list[End]]:
        """Texts of each prompt."""
        ends = [self._ends[index] for index in range(len(self._choices))]
        num = self._asked.num_texts
        return [ends[start : start + num] for start in range(0, len(ends), num)]

    def _best(self) -> list[Json]:
        """Choices of the answer: of each prompt's texts as many as are wanted, the best first."""
        num = self._asked.n
        best: list[Json] = []
        for number, group in enumerate(self._groups()):
            pairs = [*zip(self._choices[number * len(group) :], group, strict=False)]
            if num < len(group):
                pairs.sort(key=lambda pair: mean_logprob(pair[1]), reverse=True)
            best += [choice.whole(group[0], end) for choice, end in pairs[:num]]
        return [choice | {"index": index} for index, choice in enumerate(best)]

    def _usage(self) -> Json:
        """Counts of tokens. A prompt with several texts counts once; accepted predictions are the
        tokens that the target itself did not choose."""
        prompts = [[end.row_stats for end in group] for group in self._groups()]
        rows = [*itertools.chain(*prompts)] if self._asked.most != 0 else []
        num_prompt = sum(group[0].num_prompt_tokens for group in prompts)
        num_new = sum(row.num_generated_tokens for row in rows)
        guessed = sum(row.by_origin["draft"] + row.by_origin["retrieval"] for row in rows)
        num_cached = sum(min(row.num_cached_tokens for row in group) for group in prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_cached},
            "completion_tokens_details": {"accepted_prediction_tokens": guessed},
        }


class Choice:
    """One text of an answer."""

    def __init__(self, index: int, request: Request, call: Call, engine: Engine) -> None:
        self._index = index
        self._asked = call.asked
        self._chat = call.chat
        self._parser = call.chat.parser() if call.chat is not None else AnswerParser()
        self._pieces: list[Piece] = []
        self._num_calls = 0
        assert not isinstance(request.prompt, str)
        self._prompt = request.prompt
        self._tokenizer = engine.tokenizer
        self._ends = () if request.generation.ignore_eos else engine.config.eos_token_ids
        self._offset = 0  # characters so far
        self._message: Json = {"role": "assistant"}  # for the first piece only, as is the echo
        self._echo = engine.tokenizer.decode(request.prompt) if call.asked.has_echo else ""

    def whole(self, first: End, end: End) -> Json:
        """All of it; `first` is a text after the same prompt, with the prompt's scores."""
        if self._asked.most == 0:  # a text has one token at least
            end = replace(end, text="", tokens=(), finish_reason="length")
        tokens = end.tokens
        if self._asked.scores_prompt:
            tokens = (*self._prompt_tokens(first.prompt_scores), *tokens)
        return self.piece(end.text, tokens, end)

    def piece(self, text: str, tokens: Sequence[Token], end: End | None = None) -> Json:
        """A text, or a part of it."""
        asked = self._asked
        reason = end.finish_reason if end is not None else None
        choice: Json = {
            "index": self._index,
            "logprobs": None,
            "finish_reason": "stop" if reason == "eos" else reason,
        }
        if asked.num_logprobs is not None and tokens:
            choice["logprobs"] = self._logprobs(tokens)
        if asked.stream and asked.details and tokens:
            choice["origin"] = tokens[-1].origin
        if end is not None and asked.num_texts > 1:
            choice["seed"] = end.seed
        if self._chat is None:
            choice["text"] = self._echo + text
            self._echo = ""
            return choice
        pieces = self._parser.push(text, is_last=end is not None)
        self._pieces += pieces
        choice["delta" if asked.stream else "message"] = self._as_message(pieces)
        if self._num_calls and reason in ("eos", "stop"):
            choice["finish_reason"] = "tool_calls"
        if end is not None:
            self._chat.keep(self._pieces, end)
        return choice

    def _as_message(self, pieces: Sequence[Piece]) -> Json:
        """Pieces of an answer as a message, or as a part of one."""
        message = self._message | {"content": ""}
        self._message = {}
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
                message[kind] = message.get(kind, "") + text
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [*calls.values()]
            if self._asked.stream:
                message["tool_calls"] = [{"index": n} | call for n, call in calls.items()]
        return message

    def _prompt_tokens(self, scores: Sequence[LogProbs]) -> list[Token]:
        """Tokens of the prompt, of which the first has no score."""
        decoder = IncrementalDecoder(self._tokenizer, [])
        texts = [decoder.push(token) for token in self._prompt]
        texts[-1] += decoder.flush()
        all_scores: list[Any] = [(None, ()), *scores]
        triples = zip(self._prompt, texts, all_scores, strict=True)
        return [Token(0, token, text, PROMPT, *score) for token, text, score in triples]

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        """Log-probabilities of tokens, without one that ends the text."""
        tokens = [
            token for token in tokens if token.origin == PROMPT or token.token_id not in self._ends
        ]
        entries = [self._entry(token.token_id, token.logprob) for token in tokens]
        tops = [[self._entry(*pair) for pair in token.top_logprobs] for token in tokens]
        pairs = zip(entries, tops, strict=True)
        if self._asked.is_chat:
            return {"content": [entry | {"top_logprobs": top} for entry, top in pairs]}
        lengths = (len(token.text) for token in tokens)
        *offsets, self._offset = itertools.accumulate(lengths, initial=self._offset)
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [  # none at the start of a prompt
                None
                if entry["logprob"] is None
                else {other["token"]: other["logprob"] for other in top}
                for entry, top in pairs
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


def mean_logprob(end: End) -> float:
    """Mean log-probability of the tokens of a text."""
    return statistics.fmean(token.logprob or 0.0 for token in end.tokens)
