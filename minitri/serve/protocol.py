"""What a client asks: from the JSON of a body to the `Request` of a row.

Fields and defaults are OpenAI's; `top_k`, `min_p`, `ignore_eos`, `speculation`, `details` and
`continue_final_message` are additions. What is said of fields here, `/docs` says, too.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minitri import Engine, GenerationConfig, Grammar, InputError, Request, SamplingParams
from minitri.errors import explain, shorten
from minitri.fields import between, changed, one_of, refuse
from minitri.filters.matcher import text_filters
from minitri.loading.prompt_ids import MAX_SEED, draw_seed
from minitri.log import log
from minitri.serve.access import ApiError

TEXT_TOKENS = 16
"""New tokens of /v1/completions unless the client says how many: OpenAI's default."""
IGNORED = ("metadata", "service_tier", "parallel_tool_calls")
USAGE = ({"include_usage": True}, {"include_usage": False})
KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
"""Of grammars, by vLLM's names."""
CUT_TOKENS = 512
"""Most that a cut in a text adds to the tokens before it: the longest have 256 characters."""
MAX_WARNINGS = 100
STOP_CHARACTERS = 1024
"""Most in all stop strings of a request: each is looked for after every token."""


@dataclass(frozen=True)
class Fields(SamplingParams):
    """What may be asked for at both endpoints."""

    is_chat = False
    model: str | None = None
    """One of the names at /v1/models. Default: the first."""
    max_tokens: int | None = between(None, 1)
    """Most tokens of the answer. Default: 16, of a chat as many as the context has room for."""
    stop: Any = ()
    """A text, or a list of texts, before which the answer ends. At most 1024 characters in all."""
    ignore_eos: bool = False
    """Go on after a token that ends the text."""
    seed: int | None = between(None, 0, MAX_SEED)
    """The same request with the same seed has the same answer. Default: drawn, and told."""
    n: int | None = one_of(None, 1)
    """How many answers."""
    stream: bool = False
    """Send the answer in pieces, as they are made."""
    stream_options: Mapping[str, bool] | None = one_of(None, *USAGE)
    """Whether a stream ends with counts of tokens."""
    details: bool = False
    """In a stream, tell how much of the prompt is read, and who guessed each token."""
    speculation: bool = True
    """Let tokens be guessed; the answer's distribution stays the same."""
    safety_identifier: str = ""
    """For whom this is. With keys, cached prompts are shared only where this is the same."""
    user: str = ""
    """The same, if there is no safety_identifier."""
    prompt_cache_key: str = ""
    """The same, if there is no user."""
    response_format: Any = None
    """Form of the answer: of type text, json_object, or json_schema, with a schema."""
    structured_outputs: Any = None
    """The same in vLLM's words: json (a schema), regex, choice, or grammar (Lark)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "grammar", self._asked_grammar() or self.grammar)

    def _asked_grammar(self) -> Grammar | None:
        """What the form of the answer says. Raises `InputError`."""
        match self.response_format, self.structured_outputs:
            case None | {"type": "text"}, None:
                return None
            case {"type": "json_object"}, None:
                return Grammar("json_object")
            case {"type": "json_schema", "json_schema": {"schema": schema}}, None:
                return Grammar("json_schema", json.dumps(schema))
            case None, {**one} if len(one) == 1 and (name := str(*one)) in KINDS:
                text = one[name]
                return Grammar(KINDS[name], text if isinstance(text, str) else json.dumps(text))
        given = shorten(repr(self.response_format or self.structured_outputs), 60)
        raise InputError(
            f"response_format or structured_outputs is {given}; see /docs for what they may be"
        )


@dataclass(frozen=True)
class TextFields(Fields):
    """Those of /v1/completions."""

    prompt: Any = ""
    """A text, a list of token ids, or a list with one of these."""
    logprobs: int | None = between(None, 0, 20)
    """Tell log-probabilities: of each token, and of so many that are likeliest."""
    best_of: int | None = one_of(None, 1)
    """How many answers the best is chosen from."""


@dataclass(frozen=True)
class ChatFields(Fields):
    """Those of /v1/chat/completions."""

    is_chat = True
    messages: Any = ()
    """A list of objects with a role and a content: a text, or a list of parts of type text."""
    max_completion_tokens: int | None = between(None, 1)
    """OpenAI's newer name of max_tokens, before which it counts."""
    logprobs: bool = False
    """Tell log-probabilities."""
    top_logprobs: int | None = between(None, 0, 20)
    """With logprobs: also of so many tokens that are likeliest."""
    continue_final_message: bool = False
    """Go on with the text of the last message."""
    tool_choice: str | None = one_of(None, "none", "auto")
    """Whether tools are called, of which there are none."""
    modalities: Sequence[str] | None = one_of(None, ["text"])
    """Kinds of answers."""


Asked = TextFields | ChatFields
Call = tuple[Request, Asked]
"""A prompt of token ids and how to go on, and how to answer."""


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
    ignored: set[str] | None = None
    """Unknown fields that there were; None: they are refused."""

    def read(self, body: bytes, *, is_chat: bool, client: str = "", salt: str = "") -> Call:
        """What a body asks for. Prompts share the cache where the salt is the same; all do without.
        Raises `InputError`, or `ApiError` where OpenAI does."""
        asked = self._fields(body, ChatFields if is_chat else TextFields)
        if asked.model not in (None, *self.names):
            message = f"model {shorten(repr(asked.model), 60)} is not served; use {self.names[0]}"
            raise ApiError(404, "model_not_found", message)
        most, logprobs = asked.max_tokens, asked.logprobs
        if isinstance(asked, ChatFields):
            most = asked.max_completion_tokens or most
            logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
            if asked.top_logprobs is not None and not asked.logprobs:
                refuse(asked, "top_logprobs", "set logprobs to true, too")
        generation = changed(GenerationConfig(), vars(asked) | {"logprobs": logprobs})
        if sum(map(len, generation.stop)) > STOP_CHARACTERS:
            refuse(asked, "stop", f"it must have at most {STOP_CHARACTERS} characters in all")
        ids = self._ids(asked) if (most or 0) <= self.context else [0]
        room = self.context - len(ids)
        num_new = most or max(1, room if is_chat else min(room, TEXT_TOKENS))
        if num_new > room:
            got = f"prompt and answer have at least {len(ids)} + {num_new} tokens of {self.context}"
            advice = "shorten the prompt, or lower max_tokens"
            raise ApiError(400, "context_length_exceeded", f"{got}; {advice}")
        user = asked.safety_identifier or asked.user or asked.prompt_cache_key
        request = Request(
            ids,
            draw_seed() if asked.seed is None else asked.seed,
            changed(self.sampling, vars(asked)),
            replace(generation, max_new_tokens=num_new),
            asked.speculation,
            f"{salt}/{user}" if salt else "",
            client,
        )
        # What is wrong with a grammar is told here, where no step waits for it.
        text_filters(request.sampling, [], self.engine.tokenizer, self.engine.config)
        return request, asked

    def _fields(self, body: bytes, kind: type[Asked]) -> Asked:
        """What is asked for; null is the default."""
        with explain("the body is no object of JSON", "send an object"):
            content = {**json.loads(body)}
        known = vars(kind(**vars(self.sampling)))
        for name, value in content.items():
            if name in (*known, *IGNORED) or not value:  # what is false or empty asks for nothing
                continue
            shown = shorten(repr(name), 60)
            if self.ignored is None:
                got = f"{shown} is {shorten(repr(value), 60)}"
                raise InputError(f"{got}, which this server does not know; leave it out")
            if name not in self.ignored and len(self.ignored) < MAX_WARNINGS:
                self.ignored.add(name)
                log.warning("the field %s is ignored: this server does not know it", shown)
        given = {name: it for name, it in content.items() if name in known and it is not None}
        return kind(**known | given)

    def _ids(self, asked: Asked) -> list[int]:
        """Token ids of the prompt, or of the messages and the answer that is to go on."""
        tokenizer = self.engine.tokenizer
        if isinstance(asked, ChatFields):
            if not (messages := asked.messages):
                raise InputError("there are no messages; send one at least")
            turns = list(map(_turn, messages if isinstance(messages, list) else [messages]))
            begun = turns.pop()["content"] if asked.continue_final_message else ""
            ids = self._encoded(tokenizer.render_chat(turns), tokenizer.encode_marked)
            return ids + self._encoded(begun, tokenizer.encode_marked)
        match asked.prompt:
            case str(text) | [str(text)]:
                return self._encoded(text, tokenizer.encode) if text else []
            case [[*ids]] | [*ids] if all(type(token) is int for token in ids):
                return ids
        got = shorten(repr(asked.prompt), 60)
        raise InputError(f"'prompt' is {got}; give one text, or one list of token ids")

    def _encoded(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Token ids of a text; if it is too long, of a beginning that is too long."""
        size = 4 * self.context
        while size < len(text):
            if len(ids := encode(text[:size])) > self.context + CUT_TOKENS:
                return ids
            size *= 2
        return encode(text)


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
