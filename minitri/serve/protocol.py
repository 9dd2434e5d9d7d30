"""What a client asks: from the JSON of a request to a `Call`.

Fields and defaults are OpenAI's; `top_k`, `min_p`, `ignore_eos`, `speculation`, `details` and
`continue_final_message` are additions. A field that this server has no use for is accepted only
where its value asks for nothing.
"""

import json
from dataclasses import dataclass
from typing import Any

from minitri import Engine, GenerationConfig, InputError, Request, SamplingParams
from minitri.errors import explain, shorten
from minitri.fields import changed
from minitri.loading.prompt_ids import draw_seed

TEXT_TOKENS = 16
"""New tokens of /v1/completions unless the client says how many: OpenAI's default."""
OWNERS = ("safety_identifier", "user", "prompt_cache_key")
IGNORED = ("metadata", "service_tier", *OWNERS)
COMMON = {"model", "stop", "ignore_eos", "max_tokens", "seed", *vars(SamplingParams()), *IGNORED}
TEXT = COMMON | {"prompt", "logprobs"}
CHAT = COMMON | {"messages", "max_completion_tokens", "top_logprobs", "parallel_tool_calls"}
"""Fields of the endpoints whose values are not limited here, and, below, others with those of their
values that are supported; so is whatever is false or empty."""
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "logprobs": (True,),
    "speculation": (True,),
    "stream": (True,),
    "details": (True,),
    "continue_final_message": (True,),
    "stream_options": ({"include_usage": True}, {"include_usage": False}),
    "n": (1,),
    "best_of": (1,),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "repetition_penalty": (1,),
}


class ApiError(Exception):
    """A request that is refused: an HTTP status, OpenAI's code for it, and one line."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
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
    details: bool = False
    """Whether a stream tells who guessed each token, and how much of the prompt was read."""


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

    def read(self, body: bytes, *, is_chat: bool, client: str = "") -> Call:
        """The call that a body stands for; the cache is shared where no client is named. Raises
        `InputError`, or `ApiError` where OpenAI does."""
        fields = _fields(body, CHAT if is_chat else TEXT)
        model = fields.get("model", self.names[0])
        if model not in self.names:
            message = f"model {shorten(repr(model), 60)} is not served; use {self.names[0]}"
            raise ApiError(404, "model_not_found", message)
        logprobs = fields.get("logprobs")
        if is_chat:
            if not (messages := fields.get("messages")):
                raise InputError("there are no messages; send one at least")
            turns = list(map(_turn, messages if isinstance(messages, list) else [messages]))
            is_begun = bool(turns) and fields.get("continue_final_message", False)
            begun = turns.pop()["content"] if is_begun else ""
            ids = self.engine.tokenizer.encode_chat(turns)
            ids += self.engine.tokenizer.encode_marked(begun)
            if "top_logprobs" in fields and not logprobs:
                raise InputError("top_logprobs is given without logprobs; set that to true, too")
            logprobs = fields.get("top_logprobs", 0) if logprobs else None
        else:
            ids = self._ids(fields.get("prompt", ""))
        room = max(1, self.context - len(ids))
        num_new = fields.get("max_tokens", room if is_chat else min(room, TEXT_TOKENS))
        num_new = fields.get("max_completion_tokens", num_new)
        own = {"max_new_tokens": num_new, "logprobs": logprobs}
        speculation = fields.get("speculation", True)
        if not isinstance(speculation, bool):
            raise InputError(f"'speculation' is {shorten(speculation, 60)}; give true or false")
        user = next((fields[name] for name in OWNERS if name in fields), "")  # for whom it asks
        request = Request(
            ids,
            fields.get("seed", draw_seed()),
            changed(self.sampling, fields),
            changed(GenerationConfig(), fields | own),
            speculation,
            f"{client}/{user}" if client else "",
        )
        include_usage = (fields.get("stream_options") or {}).get("include_usage", False)
        stream, details = (bool(fields.get(name)) for name in ("stream", "details"))
        return Call(request, is_chat, stream, include_usage, details)

    def _ids(self, prompt: Any) -> list[int]:
        """Token ids of a text, of ids, or of a list with one of those."""
        match prompt:
            case str(text) | [str(text)]:
                return self.engine.tokenizer.encode(text) if text else []
            case [[*ids]] | [*ids] if all(type(token) is int for token in ids):
                return ids
        got = shorten(repr(prompt), 60)
        raise InputError(f"'prompt' is {got}; give one text, or one list of token ids")


def _fields(body: bytes, known: set[str]) -> dict[str, Any]:
    """The fields that are not null."""
    with explain("the body is no object of JSON", "send an object"):
        content = {**json.loads(body)}
    for name, value in content.items():
        if value and name not in known and value not in SUPPORTED.get(name, ()):
            got = f"{shorten(repr(name), 60)} is {shorten(repr(value), 60)}"
            raise InputError(f"{got}, which this server does not know; leave it out")
    return {name: value for name, value in content.items() if value is not None}


def _turn(message: Any) -> dict[str, str]:
    """A message with its text as one string."""
    match message:
        case {"role": str(role), "content": content, **others} if not any(
            value for name, value in others.items() if name != "name"
        ):
            parts = content if isinstance(content, list) else [content]
            return {"role": role, "content": "".join(map(_text, parts))}
    raise InputError(f"a message is {shorten(repr(message), 60)}; give a role and a content")


def _text(part: Any) -> str:
    match part:
        case str(text) | {"type": "text", "text": str(text)}:
            return text
    raise InputError(f"a message has {shorten(repr(part), 60)}; give a text, or parts of type text")
