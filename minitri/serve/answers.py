"""How an endpoint words its answer: OpenAI's JSON, whole or in chunks, of a run's events.

    writer = WRITERS[call.is_chat](call, "smollm2-135m", engine)
    writer.whole(tokens, end)  # or first(), chunk(token) ... and last(end) of a stream

In addition to OpenAI's fields every answer has its `seed`, and in the end `timings`, named as
llama.cpp names them. It knows neither HTTP nor the run.
"""

import functools
import json
import re
import secrets
import time
from typing import Any

from minitri.engine import Engine
from minitri.loading.tokenizer import Tokenizer
from minitri.requests import End, Token
from minitri.serve.protocol import Call
from minitri.stats import RowStats

LEAST_LOGPROB = -9999.0
"""OpenAI's, for a token that is practically impossible: JSON knows no infinity."""
Json = dict[str, Any]


def to_json(content: Json) -> bytes:
    """UTF-8; what is no Unicode becomes a question mark."""
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")


class TextWriter:
    """The answer to a call of /v1/completions."""

    prefix = "cmpl"
    whole_kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, call: Call, model: str, engine: Engine) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._head["seed"] = call.request.seed
        self._include_usage = call.include_usage
        self._tokenizer = engine.tokenizer
        generation = call.request.generation
        self._has_logprobs = generation.logprobs is not None
        self._ends = () if generation.ignore_eos else engine.config.eos_token_ids
        self._offset = 0

    def whole(self, tokens: list[Token], end: End) -> Json:
        """The answer in one piece."""
        said = self._said(end.text) | {"logprobs": self._logprobs(tokens)}
        answer = self._answer(self.whole_kind, said, end.finish_reason)
        return answer | {"usage": _usage(end.row_stats), "timings": _timings(end.row_stats)}

    def first(self) -> list[Json]:
        """Chunks that a stream begins with."""
        return []

    def chunk(self, token: Token) -> list[Json]:
        """What a token adds to a stream: nothing while its text is not certain."""
        if not (token.text or self._has_logprobs):
            return []
        said = self._added(token.text) | {"logprobs": self._logprobs([token])}
        return [self._answer(self.chunk_kind, said, None)]

    def last(self, end: End) -> list[Json]:
        """Chunks that a stream ends with."""
        final = self._answer(self.chunk_kind, self._added(""), end.finish_reason)
        usage = {"object": self.chunk_kind, "choices": [], "usage": _usage(end.row_stats)}
        about = [self._head | usage] if self._include_usage else []
        return [final | {"timings": _timings(end.row_stats)}, *about]

    def _answer(self, kind: str, said: Json, finish_reason: str | None) -> Json:
        reason = "stop" if finish_reason == "eos" else finish_reason
        choice = {"index": 0, "logprobs": None, **said, "finish_reason": reason}
        return self._head | {"object": kind, "choices": [choice]}

    def _logprobs(self, tokens: list[Token]) -> Json | None:
        """Of the tokens, but for one that ends the text and is not part of it."""
        if not self._has_logprobs:
            return None
        return self._listed([token for token in tokens if token.token_id not in self._ends])

    def _named(self, token_id: int, logprob: float | None) -> Json:
        name = spelled(self._tokenizer, token_id)
        value = max(logprob or 0.0, LEAST_LOGPROB)
        return {"token": shown(name), "logprob": value, "bytes": list(name)}

    def _said(self, text: str) -> Json:
        return {"text": text}

    _added = _said

    def _listed(self, tokens: list[Token]) -> Json:
        entries = [self._named(token.token_id, token.logprob) for token in tokens]
        offsets, tops = [], []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
            top = [self._named(*pair) for pair in token.top_logprobs]
            tops.append({entry["token"]: entry["logprob"] for entry in top})
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


class ChatWriter(TextWriter):
    """The answer to a call of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first(self) -> list[Json]:
        """Who speaks."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return [self._answer(self.chunk_kind, said, None)]

    def _said(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def _added(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _listed(self, tokens: list[Token]) -> Json:
        tops = [[self._named(*pair) for pair in token.top_logprobs] for token in tokens]
        pairs = zip(tokens, tops, strict=True)
        named = [self._named(t.token_id, t.logprob) | {"top_logprobs": top} for t, top in pairs]
        return {"content": named}


WRITERS = {False: TextWriter, True: ChatWriter}
"""By whether a call is a chat."""


def num_guessed(stats: RowStats) -> int:
    """Tokens of a text that the target itself did not choose: guesses that it accepted."""
    own = ("recovered", "bonus")
    return sum(count for origin, count in stats.by_origin.items() if origin not in own)


def _usage(stats: RowStats) -> Json:
    return {
        "prompt_tokens": stats.num_prompt_tokens,
        "completion_tokens": stats.num_generated_tokens,
        "total_tokens": stats.num_prompt_tokens + stats.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.num_cached_tokens},
        "completion_tokens_details": {"accepted_prediction_tokens": num_guessed(stats)},
    }


def _timings(stats: RowStats) -> Json:
    num_read = stats.num_prompt_tokens - stats.num_cached_tokens
    return {
        "cache_n": stats.num_cached_tokens,
        "prompt_n": num_read,
        "prompt_ms": 1e3 * stats.prefill_seconds,
        "predicted_n": stats.num_generated_tokens,
        "predicted_ms": 1e3 * stats.decode_seconds,
        "predicted_per_second": (stats.num_generated_tokens - 1) / max(stats.decode_seconds, 1e-6),
        "draft_n_accepted": num_guessed(stats),
        "num_steps": stats.num_steps,
    }


def spelled(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The bytes of a token, which may be a part of a character."""
    spelling = tokenizer.token(token_id) or ""
    if re.fullmatch("<0x[0-9A-F]{2}>", spelling):
        return bytes.fromhex(spelling[3:5])
    byte_of = byte_level_alphabet()
    name = bytes(byte_of[c] for c in spelling if c in byte_of)
    is_byte_level = len(name) == len(spelling)
    if is_byte_level and name.decode("utf-8", "replace") == tokenizer.decode([token_id]):
        return name
    return spelling.replace("▁", " ").encode()


def shown(name: bytes) -> str:
    """A token's bytes as text; where they are no UTF-8, as OpenAI writes them."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in name)


@functools.cache
def byte_level_alphabet() -> dict[str, int]:
    """What byte-level BPE writes for bytes: those not visible in Latin-1 count from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted({*range(256)} - {*visible})
    return {
        **{chr(byte): byte for byte in visible},
        **{chr(256 + i): b for i, b in enumerate(hidden)},
    }
