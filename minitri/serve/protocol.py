"""What a client asks: from the JSON of a request to a `Call`, checked field by field.

    protocol = Protocol(engine, {"smollm2-135m"}, SamplingParams(temperature=1.0), context=8192)
    call = protocol.read(b'{"prompt": "The sea was", "seed": 7}', is_chat=False)

Fields and defaults are OpenAI's; `top_k`, `min_p`, `ignore_eos` and `speculation` are additions. A
field that this server has no use for is accepted where its value changes nothing (`n` of 1) and
refused elsewhere: nothing that a client asks for is left out in silence. It knows neither HTTP nor
the run. Raises `InputError`, or an `ApiError` where OpenAI has a status or code of its own.
"""

import dataclasses
import json
import secrets
from dataclasses import dataclass
from typing import Any

from minitri.engine import Engine
from minitri.errors import InputError, check_unicode, shorten
from minitri.loading.prompts import MAX_SEED, as_seeds, check_prompt
from minitri.requests import Request
from minitri.settings import GenerationConfig, SamplingParams

MAX_STOPS, MAX_STOP_LENGTH = 16, 1000
TEXT_TOKENS = 16
"""New tokens of /v1/completions unless the client says how many: OpenAI's default."""
SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]
TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,), "stream": (bool,), "stream_options": (dict,), "speculation": (bool,),
    "seed": (int,), "max_tokens": (int,), "max_completion_tokens": (int,), "messages": (list,),
    "prompt": (str, list),
}  # fmt: skip
"""Of fields that no settings class checks."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logit_bias": ({},),
    "presence_penalty": (0,), "frequency_penalty": (0,), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "response_format": ({"type": "text"},), "store": (False,),
    "modalities": (["text"],),
}  # fmt: skip
"""Values that change nothing, of fields whose other values are not supported."""
COMMON = {
    "model", "stream", "stream_options", "stop", "seed", "logprobs", "max_tokens", "ignore_eos",
    "speculation", *SAMPLING, *NEUTRAL,
    "user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier",  # not of the text
}  # fmt: skip
TEXT_FIELDS = {*COMMON, "prompt"}
CHAT_FIELDS = {
    *COMMON, "messages", "top_logprobs", "max_completion_tokens", "parallel_tool_calls",
}  # fmt: skip


class ApiError(Exception):
    """A request that is refused: an HTTP status, OpenAI's code for it, and one line."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        self.content: dict[str, Any] = {"error": error}


@dataclass(frozen=True)
class Call:
    """A checked request: what to generate, and in which form to answer."""

    request: Request
    """Its prompt is token ids."""
    is_chat: bool
    stream: bool
    include_usage: bool
    """Whether a stream ends with a chunk of usage."""


class Protocol:
    """What clients may ask of one model."""

    def __init__(
        self, engine: Engine, names: set[str], sampling: SamplingParams, context: int
    ) -> None:
        """`names` of the model; `sampling` where a client says nothing; `context` in tokens."""
        self.names, self.sampling, self.context = names, sampling, context
        self.max_body_bytes = max(1 << 20, 64 * context)  # a token of text takes about 4
        self._tokenizer = engine.tokenizer
        self._config = dataclasses.replace(engine.config, context_length=context)

    def read(self, body: bytes, *, is_chat: bool) -> Call:
        """The call that a body stands for. Tokenizes, which may take a second."""
        fields = _fields(body, CHAT_FIELDS if is_chat else TEXT_FIELDS)
        if fields.get("model", min(self.names)) not in self.names:
            name, names = shorten(repr(fields["model"]), 60), " or ".join(sorted(self.names))
            raise ApiError(404, "model_not_found", f"model {name} is not served; use {names}")
        options = fields.get("stream_options", {})
        include_usage = options.get("include_usage", False)
        if options.keys() - {"include_usage"} or type(include_usage) is not bool:
            got = shorten(options, 60)
            raise InputError(f"stream_options is {got}; give include_usage, true or false")
        if is_chat:
            ids = self._tokenizer.encode_chat([_message(m) for m in fields.get("messages", [])])
        else:
            ids = self._prompt(fields.get("prompt", ""))
        [seed] = as_seeds(fields.get("seed", secrets.randbelow(MAX_SEED + 1)), 1)
        sampling = {name: fields[name] for name in SAMPLING if name in fields}
        request = Request(
            ids, seed, dataclasses.replace(self.sampling, **sampling),
            self._generation(fields, ids, is_chat), fields.get("speculation", True),
        )  # fmt: skip
        return Call(request, is_chat, fields.get("stream", False), include_usage)

    def _generation(
        self, fields: dict[str, Any], ids: list[int], is_chat: bool
    ) -> GenerationConfig:
        """Checks the prompt, too. Without `max_tokens` a chat may fill the context."""
        room = self.context - len(ids)
        wanted = max(1, min(room, self.context if is_chat else TEXT_TOKENS))
        num_new = fields.get("max_completion_tokens", fields.get("max_tokens", wanted))
        if num_new > room:
            raise ApiError(
                400, "context_length_exceeded", f"prompt has {len(ids)} tokens and max_tokens is "
                f"{num_new}, but a text has room for {self.context}; "
                + (f"lower max_tokens to {room}" if room > 0 else "shorten the prompt"),
            )  # fmt: skip
        check_prompt(ids, self._config, num_new)
        logprobs = fields.get("logprobs")
        if is_chat:
            if type(logprobs or False) is not bool or ("top_logprobs" in fields and not logprobs):
                raise InputError(f"logprobs is {logprobs!r}; give true, and then top_logprobs")
            logprobs = fields.get("top_logprobs", 0) if logprobs else None
        stop, ignore_eos = fields.get("stop", ()), fields.get("ignore_eos", False)
        generation = GenerationConfig(num_new, stop, ignore_eos, logprobs=logprobs)
        if len(generation.stop) > MAX_STOPS or len("".join(generation.stop)) > MAX_STOP_LENGTH:
            limits = f"at most {MAX_STOPS}, of {MAX_STOP_LENGTH} characters in all"
            raise InputError(f"stop has {len(generation.stop)} strings; give {limits}")
        return generation

    def _prompt(self, prompt: str | list[Any]) -> list[int]:
        """Token ids of a text, of ids, or of a list with one of those."""
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt) if prompt else []
        if all(type(token) is int for token in prompt):
            return prompt
        got = shorten(repr(prompt), 60)
        raise InputError(f"prompt is {got}; give one text, or one list of token ids")


def _fields(body: bytes, known: set[str]) -> dict[str, Any]:
    """The fields that are not null. Raises `InputError` unless they are known and supported."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON: {shorten(error, 90)}; send an object") from None
    if not isinstance(content, dict):
        raise InputError(f"the body is {shorten(repr(content), 60)}; send an object")
    fields = {name: value for name, value in content.items() if value is not None}
    for name, value in fields.items():
        got = f"{shorten(repr(name), 60)} is {shorten(repr(value), 60)}"
        if name not in known:
            raise InputError(f"{got}, which is unknown here; known are {', '.join(sorted(known))}")
        if name in TYPES and type(value) not in TYPES[name]:  # True is no number
            kinds = " or ".join(kind.__name__ for kind in TYPES[name])
            raise InputError(f"{got}; give a value of type {kinds}")
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise InputError(f"{got}, which is not supported; give {NEUTRAL[name][0]!r}, or none")
    return fields


def _message(message: Any) -> dict[str, str]:
    """A message with its text as one string. Raises `InputError`."""
    fields = message if isinstance(message, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "".join(map(str, texts)) if is_text else None
    others = fields.keys() - {"role", "content", "name"}
    if others or not (isinstance(role, str) and isinstance(content, str)):
        got = shorten(repr(message), 60)
        raise InputError(f"a message is {got}; give a role, and a text or parts of type text")
    check_unicode(role + content, "a message")
    return {"role": role, "content": content}
