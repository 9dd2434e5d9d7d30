"""What a client asks: from the JSON of a body to the `Request` of each row.

Fields and defaults are OpenAI's; `top_k`, `min_p`, `ignore_eos`, `speculation`, `details` and
`continue_final_message` are additions, `/tokenize` and `/detokenize` are vLLM's. What is said of
fields here, `/docs` says, too.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from minitri import Engine, GenerationConfig, Grammar, InputError, Request, SamplingParams
from minitri.apps.serve.access import ApiError
from minitri.apps.serve.body import grammar_of, is_ids, read_object
from minitri.apps.serve.chats.chat_prompt import ChatPrompt
from minitri.apps.serve.chats.replay import Replay
from minitri.apps.serve.chats.tools import read_tools
from minitri.core.errors import shorten
from minitri.core.fields import between, changed, one_of, refuse
from minitri.core.log import log
from minitri.core.settings import MAX_ROWS
from minitri.text.filters import text_filters
from minitri.text.prompt_ids import draw_seed, fold_seed, next_seed

TEXT_TOKENS = 16
"""New tokens of /v1/completions unless the client says how many: OpenAI's default."""
IGNORED = ("metadata", "service_tier", "store")
STREAMS = ({"include_usage": True}, {"include_usage": False}, {"include_obfuscation": False})
NEUTRAL = {"truncation": "disabled", "include": ["reasoning.encrypted_content"]}
"""Values of unknown fields that ask for nothing, as does whatever is false or empty."""
CUT_TOKENS = 512
"""Most that a cut in a text adds to the tokens before it: the longest have 256 characters."""
MAX_PROMPTS = 2048
"""Of a request: OpenAI's limit. More are refused before each becomes `n` requests."""
MAX_WARNINGS = 100
F = TypeVar("F", bound=Any)
STOP_CHARACTERS = 1024
"""Most in all stop strings of a request: each is looked for after every token."""


@dataclass(frozen=True)
class Fields(SamplingParams):
    """What may be asked for at all endpoints that answer with a text."""

    is_chat = False
    echo = False
    model: str | None = None
    """One of the names at /v1/models. Default: the first."""
    max_tokens: int | None = between(None, 1)
    """Most tokens of the answer. Default: 16, of a chat as many as the context has room for."""
    stop: Any = ()
    """A text, or a list of texts, before which the answer ends. At most 1024 characters in all."""
    ignore_eos: bool = False
    """Go on after a token that ends the text."""
    seed: int | None = between(None, -(1 << 63), (1 << 64) - 1)
    """The same request with the same seed has the same answer; answer i has that of seed + i. Of 64
    bits (those of a negative number, too) the upper 32 are combined with the lower ones by
    exclusive or. Default: drawn, and told."""
    n: int = between(1, 1, MAX_ROWS)
    """How many answers to each prompt."""
    stream: bool = False
    """Send the answer in pieces, as they are made."""
    stream_options: Mapping[str, bool] | None = one_of(None, *STREAMS)
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
        grammar = grammar_of(self.response_format, self.structured_outputs)
        object.__setattr__(self, "grammar", grammar or self.grammar)

    @property
    def num_texts(self) -> int:
        """That are made of each prompt; the n best are its answers."""
        return self.n

    @property
    def num_logprobs(self) -> int | None:
        """Of how many likely tokens log-probabilities are told; None: of no token."""
        return None

    def as_chat(self) -> dict[str, Any] | None:
        """The body of a chat that asks for the same; None where it is no other."""
        return None


@dataclass(frozen=True)
class TextFields(Fields):
    """Those of /v1/completions."""

    prompt: Any = ""
    """A text, a list of token ids, or a list of these: then each has its answers, in this order."""
    max_tokens: int | None = between(None, 0)
    """Most tokens of an answer, or with echo none. Default: 16."""
    echo: bool = False
    """Begin with the prompt, and if logprobs are asked for with those of its tokens."""
    logprobs: int | None = between(None, 0, 20)
    """Tell log-probabilities: of each token, and of so many that are likeliest."""
    best_of: int | None = between(None, 1, MAX_ROWS)
    """How many answers the n with the highest mean log-probability are chosen from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_texts < self.n:
            refuse(self, "best_of", f"it must be at least n, which is {self.n}")
        if self.stream and self.num_texts > self.n:
            refuse(self, "best_of", "a stream does not wait for the best; leave one of them out")
        if self.stream and self.echo and self.logprobs is not None:
            refuse(self, "echo", "a stream has no log-probabilities of a prompt; leave one out")
        if self.max_tokens == 0 and (self.stream or not self.echo):
            refuse(self, "max_tokens", "nothing would be answered; add echo, without stream")

    @property
    def num_texts(self) -> int:
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            refuse(self, "top_logprobs", "set logprobs to true, too")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


Call = tuple[list[Request], Fields, ChatPrompt | None]
"""Prompts of token ids, once for each text, and how to go on; how to answer, and of a chat its
conversation."""


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
    replay: Replay = field(default_factory=Replay)

    def read(self, body: bytes, kind: type[Fields], client: str = "", salt: str = "") -> Call:
        """What a body asks for. Prompts share the cache where the salt is the same; all do without.
        Raises `InputError`, or `ApiError` where OpenAI does."""
        asked = chat = self.parsed(body, kind(**vars(self.sampling)))
        if (content := asked.as_chat()) is not None:
            chat = self._known(content, ChatFields(**vars(self.sampling)))
        requests, conversation = self._requests(chat, client, salt)
        return requests, asked, conversation

    def _requests(
        self, asked: Fields, client: str, salt: str
    ) -> tuple[list[Request], ChatPrompt | None]:
        most, logprobs = asked.max_tokens, asked.num_logprobs
        if isinstance(asked, ChatFields):
            most = asked.max_completion_tokens or most
        scores_prompt = asked.echo and logprobs is not None
        if asked.num_texts > asked.n:
            logprobs = logprobs or 0
        generation = changed(GenerationConfig(), vars(asked) | {"logprobs": logprobs})
        if sum(map(len, generation.stop)) > STOP_CHARACTERS:
            refuse(asked, "stop", f"it must have at most {STOP_CHARACTERS} characters in all")
        user = asked.safety_identifier or asked.user or asked.prompt_cache_key
        owner = f"{salt}/{user}" if salt else ""
        chat = self.chat(asked, owner) if isinstance(asked, ChatFields) else None
        prompts = [[0]] if chat is None else [chat.token_ids]
        if isinstance(asked, TextFields) and (most or 0) <= self.context:
            prompts = self._prompts(asked)
        sampling = changed(self.sampling, vars(asked))
        if chat is not None and chat.grammar:
            if sampling.grammar is not None:
                raise InputError("response_format is given with tools; leave one of them out")
            sampling = replace(sampling, grammar=Grammar("lark", chat.grammar))
        # What is wrong with a grammar is told here, where no step waits for it.
        text_filters(sampling, [], self.engine.tokenizer, self.engine.config)
        seed = draw_seed() if asked.seed is None else fold_seed(asked.seed)
        requests: list[Request] = []
        for ids in prompts:
            room = self.context - len(ids)
            num_new = (room if asked.is_chat else min(room, TEXT_TOKENS)) if most is None else most
            if (num_new := max(1, num_new)) > room:
                got = f"prompt and answer have at least {len(ids)} + {num_new} tokens"
                text = f"{got} of {self.context}; shorten the prompt, or lower max_tokens"
                name = "messages" if asked.is_chat else "prompt"
                raise ApiError(400, "context_length_exceeded", text, name)
            for i in range(asked.num_texts):
                request = Request(
                    ids,
                    next_seed(seed, len(requests)),
                    sampling,
                    replace(generation, max_new_tokens=num_new),
                    asked.speculation,
                    owner,
                    client,
                    chat.shown if chat is not None else (),
                    scores_prompt and i == 0,
                )
                requests.append(request)
        return requests, chat

    def parsed(self, body: bytes, defaults: F) -> F:
        """What is asked for. Raises `ApiError` for another model."""
        asked = self._known(read_object(body), defaults)
        if asked.model is not None:
            self.check_model(asked.model)
        return asked

    def check_model(self, name: str) -> None:
        """Raises `ApiError` for another model's name."""
        if name not in self.names:
            message = f"model {shorten(repr(name), 60)} is not served; use {self.names[0]}"
            raise ApiError(404, "model_not_found", message, "model")

    def _known(self, content: Mapping[str, Any], defaults: F) -> F:
        """The fields that are known; others that ask for something are refused, or ignored."""
        known = vars(defaults)
        for name, value in content.items():
            if name in (*known, *IGNORED) or not value or value == NEUTRAL.get(name):
                continue
            shown = shorten(repr(name), 60)
            if self.ignored is None:
                got = f"{shown} is {shorten(repr(value), 60)}"
                raise InputError(f"{got}, which this server does not know; leave it out")
            if name not in self.ignored and len(self.ignored) < MAX_WARNINGS:
                self.ignored.add(name)
                log.warning("the field %s is ignored: this server does not know it", shown)
        return changed(defaults, content)

    def _prompts(self, asked: TextFields) -> list[list[int]]:
        """Token ids of each."""
        given = asked.prompt
        prompts = [given] if isinstance(given, str) or is_ids(given) else given
        if not isinstance(prompts, list) or not all(
            isinstance(it, str) or is_ids(it) for it in prompts
        ):
            refuse(asked, "prompt", "give a text, a list of token ids, or a list of these")
        if len(prompts) > MAX_PROMPTS:
            refuse(asked, "prompt", f"it must have at most {MAX_PROMPTS} texts")
        encode = self.engine.tokenizer.encode
        return [it if is_ids(it) else self._encoded(it, encode) if it else [] for it in prompts]

    def chat(self, asked: ChatFields, owner: str = "") -> ChatPrompt:
        """The conversation of a request."""
        tools = read_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        return ChatPrompt(
            asked.messages,
            tools,
            self.engine,
            self.replay,
            functools.partial(self._encoded, encode=self.engine.tokenizer.encode_marked),
            owner=owner,
            goes_on=asked.continue_final_message,
        )

    def _encoded(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Token ids of a text; if it is too long, of a beginning that is too long."""
        size = 4 * self.context
        while size < len(text):
            if len(ids := encode(text[:size])) > self.context + CUT_TOKENS:
                return ids
            size *= 2
        return encode(text)
