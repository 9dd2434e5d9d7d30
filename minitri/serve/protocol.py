"""What a client asks: from the JSON of a request to a `Call`.

    protocol = Protocol(engine, ["smollm2-135m"], SamplingParams(temperature=1.0), context=8192)
    call = protocol.read(b'{"prompt": "The sea was", "seed": 7}', is_chat=False)

Fields and defaults are OpenAI's; `top_k`, `min_p`, `ignore_eos` and `speculation` are additions. A
field that this server has no use for is accepted where its value asks for nothing (`n` of 1, an
empty list, false) and refused elsewhere. What the settings and the engine check is left to them. It
knows neither HTTP nor the run.
"""

import json
import secrets
from dataclasses import dataclass
from typing import Any

from minitri import Engine, GenerationConfig, InputError, Request, SamplingParams
from minitri.errors import shorten
from minitri.fields import changed
from minitri.loading.prompt_ids import MAX_SEED

MAX_STOP_LENGTH = 1000
"""Characters of all stop strings."""
TEXT_TOKENS = 16
"""New tokens of /v1/completions unless the client says how many: OpenAI's default."""
COMMON: dict[str, Any] = {
    **dict.fromkeys(("model", "stop", "ignore_eos", *vars(SamplingParams())), object),
    **dict.fromkeys(("user", "metadata", "safety_identifier", "prompt_cache_key"), object),
    "service_tier": object,
    "max_tokens": int,
    "seed": int,
    "speculation": bool,
    "stream": bool,
    "stream_options": ({"include_usage": True}, {"include_usage": False}),
    "n": (1,),
    "best_of": (1,),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields of both endpoints: the type that a value must have, or the values that are supported."""
TEXT = COMMON | {"prompt": object, "logprobs": object}
CHAT = COMMON | {
    "messages": list,
    "max_completion_tokens": int,
    "logprobs": bool,
    "top_logprobs": object,
    "parallel_tool_calls": object,
}


class ApiError(Exception):
    """A request that is refused: an HTTP status, OpenAI's code for it, and one line."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        self.content: dict[str, Any] = {"error": error}


@dataclass(frozen=True)
class Call:
    """What to generate, and in which form to answer."""

    request: Request
    """Its prompt is token ids."""
    is_chat: bool
    stream: bool
    include_usage: bool
    """Whether a stream ends with a chunk of usage."""


@dataclass(frozen=True)
class Protocol:
    """What clients may ask of one model."""

    engine: Engine
    names: list[str]
    """Of the model; answers have the first."""
    sampling: SamplingParams
    """Where a client says nothing."""
    context: int
    """Tokens of a prompt and its answer."""

    @property
    def max_body_bytes(self) -> int:
        return max(1 << 20, 64 * self.context)  # a token of text takes about 4

    def read(self, body: bytes, *, is_chat: bool) -> Call:
        """The call that a body stands for. Tokenizes, which may take a second.

        Raises `InputError`, or an `ApiError` where OpenAI has a status or code of its own.
        """
        fields = _fields(body, CHAT if is_chat else TEXT)
        model = fields.get("model", self.names[0])
        if model not in self.names:
            message = f"model {shorten(repr(model), 60)} is not served; use {self.names[0]}"
            raise ApiError(404, "model_not_found", message)
        if is_chat:
            turns = [_turn(message) for message in fields.get("messages", [])]
            ids = self.engine.tokenizer.encode_chat(turns)
        else:
            ids = self._ids(fields.get("prompt", ""))
        request = Request(
            ids,
            fields.get("seed", secrets.randbelow(MAX_SEED + 1)),
            changed(self.sampling, fields),
            self._generation(fields, len(ids), is_chat=is_chat),
            fields.get("speculation", True),
        )
        include_usage = (fields.get("stream_options") or {}).get("include_usage", False)
        return Call(request, is_chat, fields.get("stream", False), include_usage)

    def _generation(
        self, fields: dict[str, Any], num_prompt: int, *, is_chat: bool
    ) -> GenerationConfig:
        """Without `max_tokens` a chat may fill the context."""
        room = self.context - num_prompt
        wanted = max(1, room if is_chat else min(room, TEXT_TOKENS))
        num_new = fields.get("max_completion_tokens", fields.get("max_tokens", wanted))
        if num_new > room:
            message = (
                f"prompt has {num_prompt} tokens and max_tokens is {num_new}, but a text has room "
                f"for {self.context}; shorten the prompt, or lower max_tokens"
            )
            raise ApiError(400, "context_length_exceeded", message)
        logprobs = fields.get("logprobs")
        if is_chat:
            if "top_logprobs" in fields and not logprobs:
                raise InputError("top_logprobs is given without logprobs; set that to true, too")
            logprobs = fields.get("top_logprobs", 0) if logprobs else None
        stop = fields.get("stop", ())
        generation = GenerationConfig(
            num_new, stop, fields.get("ignore_eos", False), logprobs=logprobs
        )
        if (length := len("".join(generation.stop))) > MAX_STOP_LENGTH:
            raise InputError(f"stop has {length} characters; give at most {MAX_STOP_LENGTH} in all")
        return generation

    def _ids(self, prompt: Any) -> list[int]:
        """Token ids of a text, of ids, or of a list with one of those."""
        match prompt:
            case str(text) | [str(text)]:
                return self.engine.tokenizer.encode(text) if text else []
            case [[*ids]] | [*ids] if all(type(token) is int for token in ids):
                return ids
        got = shorten(repr(prompt), 60)
        raise InputError(f"'prompt' is {got}; give one text, or one list of token ids")


def _fields(body: bytes, known: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not null."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON: {shorten(error, 90)}; send an object") from None
    if not isinstance(content, dict):
        raise InputError(f"the body is {shorten(repr(content), 60)}; send an object")
    fields = {name: value for name, value in content.items() if value is not None}
    for name, value in fields.items():
        got = f"{shorten(repr(name), 60)} is {shorten(repr(value), 60)}"
        wanted = known.get(name, ())
        if isinstance(wanted, tuple):
            if value and value not in wanted:
                raise InputError(f"{got}, which this server does not know; leave it out")
        elif wanted not in (object, type(value)):
            raise InputError(f"{got}; give a value of type {wanted.__name__}")
    return fields


def _turn(message: Any) -> dict[str, str]:
    """A message with its text as one string."""
    match message:
        case {"role": str(role), "content": content, **others} if others.keys() <= {"name"}:
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            if all(map(_is_text, parts)):
                return {"role": role, "content": "".join(part["text"] for part in parts)}
    got = shorten(repr(message), 60)
    raise InputError(f"a message is {got}; give a role, and a text or parts of type text")


def _is_text(part: Any) -> bool:
    """Whether it is a part of a message that has a text."""
    is_part = isinstance(part, dict) and part.get("type") == "text"
    return is_part and isinstance(part.get("text"), str)
