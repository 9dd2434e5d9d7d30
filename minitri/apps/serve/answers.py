"""How an endpoint words its answer: OpenAI's JSON, whole or as a stream, of a run's events.

In addition to OpenAI's fields every answer has its `seed`, of several each its own; chunks of a
stream with `details` have the token's `origin` (`minitri.Token`), or `prompt_progress`, in the
words of llama.cpp's server.
"""

import itertools
import json
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from minitri import End, Engine, Event, Idle, Request, Token
from minitri.apps.serve.access import ApiError
from minitri.apps.serve.chats.answer_parser import AnswerParser, Piece
from minitri.apps.serve.chats.chat_prompt import ChatPrompt
from minitri.apps.serve.protocol import Fields
from minitri.core.requests import PrefillProgress
from minitri.core.stats import LogProbs
from minitri.text.text_stream import IncrementalDecoder

LEAST_LOGPROB = -9999.0
"""OpenAI's, for a token that is practically impossible: JSON knows no infinity."""
PROMPT = "prompt"
"""Origin of tokens that are of the prompt."""
Json = dict[str, Any]


def to_json(content: Json, default: Callable[[Any], Json | None] | None = None) -> bytes:
    """UTF-8; what is no Unicode becomes a question mark, what is no JSON what `default` says."""
    return json.dumps(content, ensure_ascii=False, default=default).encode("utf-8", "replace")


def in_stream(content: bytes) -> bytes:
    """JSON as an event of a stream."""
    return b"data: %b\n\n" % content


class Writer:
    """The answer to one call, of one text or several."""

    def __init__(
        self,
        requests: Sequence[Request],
        asked: Fields,
        model: str,
        engine: Engine,
        chat: ChatPrompt | None = None,
    ) -> None:
        self._asked = asked
        self._choices = [Choice(request, asked, engine, chat) for request in requests]
        self._ends: dict[int, End] = {}  # by the numbers of their choices
        kind = "text_completion"
        if asked.is_chat:
            kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        self.id = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}
        self._head["seed"] = requests[0].seed
        self._tells_usage = bool((asked.stream_options or {}).get("include_usage"))

    def take(self, index: int, event: Event) -> bytes:
        """What an event of one text adds to the answer: nothing while that is not certain."""
        asked = self._asked
        has_details = asked.stream and asked.details
        match event:
            case PrefillProgress(num_done=done, num_tokens=total, num_cached=cached) if has_details:
                progress = {"processed": done, "total": total, "cache": cached}
                return self._chunk([], prompt_progress=progress)
            case Token(text=text) if asked.stream:
                if text or has_details or asked.num_logprobs is not None:
                    return self._chunk([self._choices[index].piece(index, text, [event])])
            case End():
                self._ends[index] = event
                is_last = len(self._ends) == len(self._choices)
                if asked.stream:
                    last = self._chunk([self._choices[index].piece(index, "", [], event)])
                    return last + self._tail() if is_last else last
                if is_last:
                    return self._json(self._best(), usage=usage(self._groups(), asked))
            case Idle() if asked.stream:
                return b": waiting\n\n"
        return b""

    def fail(self, error: ApiError) -> bytes:
        """The end of a stream that has begun and cannot go on."""
        return in_stream(to_json(error.content))

    def _tail(self) -> bytes:
        """The end of a stream."""
        counts = in_stream(self._json([], usage=usage(self._groups(), self._asked)))
        return counts * self._tells_usage + in_stream(b"[DONE]")

    def _chunk(self, choices: list[Json], **others: Json | None) -> bytes:
        """A piece of a stream."""
        if self._tells_usage:
            others["usage"] = None
        return in_stream(self._json(choices, **others))

    def _json(self, choices: list[Json], **others: Json | None) -> bytes:
        return to_json(self._head | {"choices": choices} | others, self._choices[0].likeliest)

    def _groups(self) -> list[list[End]]:
        """The texts of each prompt."""
        num = self._asked.num_texts
        starts = range(0, len(self._choices), num)
        return [[self._ends[i] for i in range(start, start + num)] for start in starts]

    def _best(self) -> list[Json]:
        """The choices: of each prompt's texts as many as are wanted, the best first."""
        num = self._asked.n
        found: list[Json] = []
        for number, group in enumerate(self._groups()):
            pairs = [*zip(self._choices[number * len(group) :], group, strict=False)]
            if num < len(group):
                pairs.sort(key=lambda pair: mean_logprob(pair[1]), reverse=True)
            found += [choice.whole(group[0], end) for choice, end in pairs[:num]]
        return [choice | {"index": index} for index, choice in enumerate(found)]


class Choice:
    """One text of an answer."""

    def __init__(
        self, request: Request, asked: Fields, engine: Engine, chat: ChatPrompt | None
    ) -> None:
        self._chat = chat
        self._parser = chat.parser() if chat is not None else AnswerParser()
        self._pieces: list[Piece] = []
        self._num_calls = 0
        assert not isinstance(request.prompt, str)
        self._prompt = request.prompt
        self._asked = asked
        self._tokenizer = engine.tokenizer
        self._ends = () if request.generation.ignore_eos else engine.config.eos_token_ids
        self._offset = 0  # characters so far
        self._speaker = {"role": "assistant"}  # is told once
        self._echo = engine.tokenizer.decode(self._prompt) if asked.echo else ""  # so is this

    def whole(self, first: End, end: End) -> Json:
        """All of it; `first` was made of the same prompt, whose scores it has."""
        if self._asked.max_tokens == 0:  # of the one token that a text has at least
            end = replace(end, text="", tokens=(), finish_reason="length")
        tokens = end.tokens
        if self._asked.echo and self._asked.num_logprobs is not None:
            tokens = (*self._prompt_tokens(first.prompt_scores), *tokens)
        return self.piece(0, end.text, tokens, end)

    def piece(self, index: int, text: str, tokens: Sequence[Token], end: End | None = None) -> Json:
        """A text, or a part of it."""
        asked = self._asked
        reason = end.finish_reason if end is not None else None
        choice: Json = {
            "index": index,
            "logprobs": None,
            "finish_reason": "stop" if reason == "eos" else reason,
        }
        if asked.num_logprobs is not None and tokens:
            choice["logprobs"] = self._logprobs(tokens)
        if asked.stream and asked.details and tokens:
            choice["origin"] = tokens[-1].origin
        if end is not None and asked.num_texts > 1:
            choice["seed"] = end.seed
        if self._chat is not None:
            pieces = self._parser.push(text, is_last=end is not None)
            self._pieces += pieces
            choice["delta" if asked.stream else "message"] = self._said(pieces)
            if self._num_calls and reason in ("eos", "stop"):
                choice["finish_reason"] = "tool_calls"
            if end is not None:
                self._chat.keep(self._pieces, end)
        else:
            choice["text"] = self._echo + text
            self._echo = ""
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

    def _prompt_tokens(self, scores: Sequence[LogProbs]) -> list[Token]:
        """Those of the prompt, of which the first has no score."""
        decoder = IncrementalDecoder(self._tokenizer, [])
        texts = [decoder.push(token) for token in self._prompt]
        texts[-1] += decoder.flush()
        known: list[Any] = [(None, ()), *scores]
        pairs = zip(self._prompt, texts, known, strict=True)
        return [Token(0, token, text, PROMPT, *score) for token, text, score in pairs]

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        """Of the tokens, but for one that ends the text and is not part of it. What is said of the
        likeliest ones is made while JSON is written, between which other threads run."""
        tokens = [it for it in tokens if it.origin == PROMPT or it.token_id not in self._ends]
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

    def likeliest(self, token: Token) -> Json | None:
        """Those at the place of a token, in a chat with itself; None at the start of a prompt."""
        if token.logprob is None:
            return None
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
        shown = None if logprob is None else max(logprob, LEAST_LOGPROB)
        return {"token": text, "logprob": shown, "bytes": utf8}


def mean_logprob(end: End) -> float:
    """Of the tokens of a text."""
    return statistics.fmean(token.logprob or 0.0 for token in end.tokens)


def usage(groups: Sequence[Sequence[End]], asked: Fields) -> Json:
    """Counts of tokens, by the texts of each prompt, which counts once; accepted predictions are
    those that the target itself did not choose."""
    prompts = [[end.row_stats for end in group] for group in groups]
    texts = [*itertools.chain(*prompts)] if asked.max_tokens != 0 else []
    num_prompt = sum(rows[0].num_prompt_tokens for rows in prompts)
    num_new = sum(row.num_generated_tokens for row in texts)
    guessed = sum(row.by_origin[origin] for row in texts for origin in ("draft", "retrieval"))
    num_cached = sum(min(row.num_cached_tokens for row in rows) for rows in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"accepted_prediction_tokens": guessed},
    }
