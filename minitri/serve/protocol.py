"""What a client asks: from the JSON of a body to the `Request` of a row.

Fields and defaults are OpenAI's; `top_k`, `min_p`, `ignore_eos`, `speculation`, `details` and
`continue_final_message` are additions. What is said of fields here, `/docs` says, too.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minitri import Engine, GenerationConfig, Grammar, InputError, Request, SamplingParams
from minitri.errors import explain, shorten
from minitri.fields import between, changed, one_of, refuse
from minitri.filters.matcher import text_filters
from minitri.loading.prompt_ids import MAX_SEED, draw_seed
from minitri.log import log
from minitri.serve.access import ApiError
from minitri.serve.chats.chat_prompt import ChatPrompt
from minitri.serve.chats.replay import Replay
from minitri.serve.chats.tools import read_tools

TEXT_TOKENS = 16
"""New tokens of /v1/completions unless the client says how many: OpenAI's default."""
IGNORED = ("metadata", "service_tier")
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
    """A list of objects with a role and a content: a text, or a list of parts of type text. Answers
    may have tool_calls, and messages of the role tool the tool_call_id of one."""
    max_completion_tokens: int | None = between(None, 1)
    """OpenAI's newer name of max_tokens, before which it counts."""
    logprobs: bool = False
    """Tell log-probabilities."""
    top_logprobs: int | None = between(None, 0, 20)
    """With logprobs: also of so many tokens that are likeliest."""
    continue_final_message: bool = False
    """Go on with the text of the last message."""
    tools: Any = ()
    """Functions that the answer may call: objects of type function, with a name and a schema."""
    tool_choice: Any = None
    """Whether it calls some: auto, none, required, or the function to call."""
    parallel_tool_calls: bool | None = None
    """Whether it may call several. Default: true."""
    modalities: Sequence[str] | None = one_of(None, ["text"])
    """Kinds of answers."""


Asked = TextFields | ChatFields
Call = tuple[Request, Asked, ChatPrompt | None]
"""A prompt of token ids and how to go on; how to answer, and of a chat its conversation."""


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
    tool_format: str | None = None
    """How the model writes calls; None: as its chat template does."""
    replay: Replay = field(default_factory=Replay)

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
        user = asked.safety_identifier or asked.user or asked.prompt_cache_key
        owner = f"{salt}/{user}" if salt else ""
        chat = self._chat(asked, owner) if isinstance(asked, ChatFields) else None
        ids = [0] if chat is None else chat.token_ids
        if isinstance(asked, TextFields) and (most or 0) <= self.context:
            ids = self._ids(asked)
        sampling = changed(self.sampling, vars(asked))
        if chat is not None and chat.grammar:
            if sampling.grammar is not None:
                raise InputError("response_format is given with tools; leave one of them out")
            sampling = replace(sampling, grammar=Grammar("lark", chat.grammar))
        room = self.context - len(ids)
        num_new = most or max(1, room if is_chat else min(room, TEXT_TOKENS))
        if num_new > room:
            got = f"prompt and answer have at least {len(ids)} + {num_new} tokens of {self.context}"
            advice = "shorten the prompt, or lower max_tokens"
            raise ApiError(400, "context_length_exceeded", f"{got}; {advice}")
        request = Request(
            ids,
            draw_seed() if asked.seed is None else asked.seed,
            sampling,
            replace(generation, max_new_tokens=num_new),
            asked.speculation,
            owner,
            client,
            chat.shown if chat is not None else (),
        )
        # What is wrong with a grammar is told here, where no step waits for it.
        text_filters(request.sampling, [], self.engine.tokenizer, self.engine.config)
        return request, asked, chat

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

    def _chat(self, asked: ChatFields, owner: str) -> ChatPrompt:
        tools = read_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        return ChatPrompt(
            asked.messages,
            tools,
            self.engine,
            self.replay,
            functools.partial(self._encoded, encode=self.engine.tokenizer.encode_marked),
            owner=owner,
            goes_on=asked.continue_final_message,
            tool_format=self.tool_format,
        )

    def _ids(self, asked: TextFields) -> list[int]:
        """Token ids of the prompt."""
        match asked.prompt:
            case str(text) | [str(text)]:
                return self._encoded(text, self.engine.tokenizer.encode) if text else []
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
