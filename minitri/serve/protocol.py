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
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails

from minitri.engine import Engine
from minitri.errors import InputError, check_unicode, shorten
from minitri.loading.prompt_ids import MAX_SEED, as_seeds, check_prompt
from minitri.requests import Request
from minitri.settings import GenerationConfig, SamplingParams

MAX_STOPS, MAX_STOP_LENGTH = 16, 1000
TEXT_TOKENS = 16
"""New tokens of /v1/completions unless the client says how many: OpenAI's default."""
SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "modalities": (["text"],),
}
"""Values that change nothing, of fields whose other values are not supported."""
IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier")
"""Fields that do not concern the text."""
HINTS = {
    "stream_options": "include_usage, true or false",
    "prompt": "one text, or one list of token ids",
    "messages": "a role, and a text or parts of type text",
}
"""What to give in place of a wrong value whose parts are checked, too."""


class Strict(BaseModel):
    """A JSON object without unknown fields, whose values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """Whether a stream ends with a chunk of usage."""

    include_usage: bool = False


class Part(BaseModel):
    """A piece of a message's text."""

    model_config = ConfigDict(strict=True)
    type: Literal["text"]
    text: str


class Message(Strict):
    """A turn of a chat."""

    role: str
    content: str | list[Part]
    name: Any = None


class CommonFields(Strict):
    """Types that no settings class checks, of both endpoints."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    seed: int | None = None
    max_tokens: int | None = None
    speculation: bool = True
    stop: Any = ()
    logprobs: Any = None
    ignore_eos: Any = False


ANY: dict[str, Any] = dict.fromkeys((*SAMPLING, *NEUTRAL, *IGNORED), (Any, None))
TextFields = create_model("TextFields", __base__=CommonFields, prompt=(str | list[Any], ""), **ANY)
ChatFields = create_model(
    "ChatFields",
    __base__=CommonFields,
    messages=(list[Message], []),
    max_completion_tokens=(int | None, None),
    top_logprobs=(Any, None),
    parallel_tool_calls=(Any, None),
    **ANY,
)


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
        self.names = names
        self.sampling = sampling
        self.context = context
        self.max_body_bytes = max(1 << 20, 64 * context)  # a token of text takes about 4
        self._tokenizer = engine.tokenizer
        self._config = dataclasses.replace(engine.config, context_length=context)

    def read(self, body: bytes, *, is_chat: bool) -> Call:
        """The call that a body stands for. Tokenizes, which may take a second."""
        fields, checked = _fields(body, ChatFields if is_chat else TextFields)
        if fields.get("model", min(self.names)) not in self.names:
            name = shorten(repr(fields["model"]), 60)
            names = " or ".join(sorted(self.names))
            raise ApiError(404, "model_not_found", f"model {name} is not served; use {names}")
        if is_chat:
            ids = self._tokenizer.encode_chat([_turn(m) for m in fields.get("messages", [])])
        else:
            ids = self._prompt(fields.get("prompt", ""))
        [seed] = as_seeds(fields.get("seed", secrets.randbelow(MAX_SEED + 1)), 1)
        sampling = {name: fields[name] for name in SAMPLING if name in fields}
        request = Request(
            ids,
            seed,
            dataclasses.replace(self.sampling, **sampling),
            self._generation(fields, ids, is_chat),
            checked.speculation,
        )
        return Call(request, is_chat, checked.stream, checked.stream_options.include_usage)

    def _generation(
        self, fields: dict[str, Any], ids: list[int], is_chat: bool
    ) -> GenerationConfig:
        """Checks the prompt, too. Without `max_tokens` a chat may fill the context."""
        room = self.context - len(ids)
        wanted = max(1, min(room, self.context if is_chat else TEXT_TOKENS))
        num_new = fields.get("max_completion_tokens", fields.get("max_tokens", wanted))
        if num_new > room:
            raise ApiError(
                400,
                "context_length_exceeded",
                f"prompt has {len(ids)} tokens and max_tokens is "
                f"{num_new}, but a text has room for {self.context}; "
                + (f"lower max_tokens to {room}" if room > 0 else "shorten the prompt"),
            )
        check_prompt(ids, self._config, num_new)
        logprobs = fields.get("logprobs")
        if is_chat:
            if type(logprobs or False) is not bool or ("top_logprobs" in fields and not logprobs):
                raise InputError(f"logprobs is {logprobs!r}; give true, and then top_logprobs")
            logprobs = fields.get("top_logprobs", 0) if logprobs else None
        stop = fields.get("stop", ())
        ignore_eos = fields.get("ignore_eos", False)
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


def _fields(body: bytes, kind: type[CommonFields]) -> tuple[dict[str, Any], CommonFields]:
    """The fields that are not null, as sent and as checked. Raises `InputError`."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON: {shorten(error, 90)}; send an object") from None
    if not isinstance(content, dict):
        raise InputError(f"the body is {shorten(repr(content), 60)}; send an object")
    fields = {name: value for name, value in content.items() if value is not None}
    for name in fields:
        if name not in kind.model_fields:
            known = ", ".join(sorted(kind.model_fields))
            raise InputError(f"{_got(name, fields)}, which is unknown here; known are {known}")
        if name in NEUTRAL and fields[name] not in NEUTRAL[name]:
            hint = f"which is not supported; give {NEUTRAL[name][0]!r}, or none"
            raise InputError(f"{_got(name, fields)}, {hint}")
    try:
        return fields, kind.model_validate(fields)
    except ValidationError as error:
        raise _wrong(error.errors(include_url=False)[0], fields) from None


def _wrong(error: ErrorDetails, fields: dict[str, Any]) -> InputError:
    """One line of what is wrong with a field."""
    name, *path = error["loc"]
    got = _got(str(name), fields)
    hint = error["msg"].removeprefix("Input should be ")
    if name == "messages" and path:
        got = f"a message is {shorten(repr(fields['messages'][path[0]]), 60)}"
    return InputError(f"{got}; give {HINTS.get(str(name), hint)}")


def _got(name: str, fields: dict[str, Any]) -> str:
    return f"{shorten(repr(name), 60)} is {shorten(repr(fields[name]), 60)}"


def _turn(fields: dict[str, Any]) -> dict[str, str]:
    """A message with its text as one string."""
    message = Message.model_validate(fields)
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    check_unicode(message.role + text, "a message")
    return {"role": message.role, "content": text}
