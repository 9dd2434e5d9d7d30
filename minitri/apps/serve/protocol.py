"""Requests of clients for one model: from the JSON of a body to the `Request` of each text."""

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minitri import Engine, GenerationConfig, Grammar, InputError, Request, SamplingParams
from minitri.apps.serve.api_error import ApiError
from minitri.apps.serve.bodies.chat_body import Conversation
from minitri.apps.serve.bodies.completion import (
    DetokenizeBody,
    Fields,
    M,
    TextBody,
    TokenizeBody,
)
from minitri.apps.serve.bodies.strict_json import Json, checked, read_object
from minitri.apps.serve.chats.chat_prompt import ChatPrompt
from minitri.apps.serve.chats.replay import Replay
from minitri.core.errors import shorten
from minitri.core.fields import changed, refuse
from minitri.core.log import log
from minitri.text.prompt_ids import draw_seed, encode_prompt, fold_seed, next_seed
from minitri.text.rows import text_filters

TEXT_TOKENS = 16
"""New tokens at /v1/completions unless the client says how many: OpenAI's default."""
IGNORED = ("metadata", "service_tier", "store")
NEUTRAL: Json = {
    "best_of": 1,
    "include": ["reasoning.encrypted_content"],
    "modalities": ["text"],
    "truncation": "disabled",
}
"""Values of unknown fields that ask for nothing, as does whatever is false or empty."""
MAX_WARNINGS = 100


class Call(NamedTuple):
    """Texts to generate, how to word the answer, and of a chat its conversation."""

    requests: list[Request]
    asked: Fields
    chat: ChatPrompt | None


@dataclass(frozen=True)
class Protocol:
    """Reads bodies for one model."""

    engine: Engine
    names: list[str]
    """Names of the model; answers have the first."""
    sampling: SamplingParams
    """Sampling where a client says nothing."""
    context: int
    """Most tokens of a prompt and its answer."""
    ignored: set[str] | None = None
    """Unknown fields that were ignored; None: they are refused."""
    replay: Replay = field(default_factory=Replay)

    def read(self, body: bytes, kind: type[Fields], client: str = "", salt: str = "") -> Call:
        """The call that a body asks for. Prompts share the cache only with those of the same salt.
        Raises `InputError`, or `ApiError` where OpenAI has a code of its own."""
        asked = self.parsed(body, kind)
        end_user = asked.safety_identifier or asked.user or asked.prompt_cache_key
        owner = f"{salt}/{end_user}" if salt else ""
        conversation = asked.conversation
        chat = self.chat_of(conversation, owner) if conversation is not None else None
        sampling = self.sampling_of(asked, chat)
        seed = draw_seed() if asked.seed is None else fold_seed(asked.seed)
        prompts = self.prompts_of(asked) if chat is None else [chat.token_ids]
        texts = itertools.product(prompts, range(asked.n))
        requests = [
            Request(
                ids,
                next_seed(seed, number),
                sampling,
                self.generation_of(asked, len(ids)),
                speculation=asked.speculation,
                owner=owner,
                client=client,
                shown=chat.shown if chat is not None else (),
                score_prompt=asked.scores_prompt and i == 0,
            )
            for number, (ids, i) in enumerate(texts)
        ]
        return Call(requests, asked, chat)

    def sampling_of(self, asked: Fields, chat: ChatPrompt | None) -> SamplingParams:
        """Sampling of each text. A grammar is compiled here, in the thread that reads the request,
        so that a wrong one is refused and no step of others waits. Raises `InputError`."""
        given = {name: value for name, value in vars(asked).items() if value is not None}
        grammar = asked.form or asked.structured_outputs
        if chat is not None and chat.grammar:
            if grammar is not None:
                raise InputError("response_format is given with tools; leave one of them out")
            grammar = Grammar("lark", chat.grammar)
        sampling = changed(self.sampling, given | {"grammar": grammar or self.sampling.grammar})
        text_filters(sampling, [], self.engine.tokenizer, self.engine.config)
        return sampling

    def generation_of(self, asked: Fields, num_prompt_tokens: int) -> GenerationConfig:
        """When each text ends. Raises `ApiError` if the context has no room for it."""
        room = self.context - num_prompt_tokens
        default = room if asked.is_chat else min(room, TEXT_TOKENS)
        num_new = max(1, default) if asked.most is None else asked.most
        if num_new > room:
            got = f"prompt and answer have at least {num_prompt_tokens} + {num_new} tokens"
            text = f"{got} of {self.context}; shorten the prompt, or lower max_tokens"
            raise ApiError(400, "context_length_exceeded", text)
        return GenerationConfig(num_new, asked.stop, asked.ignore_eos, asked.num_logprobs)

    def prompts_of(self, asked: Fields) -> list[list[int]]:
        """Token ids of each prompt of /v1/completions."""
        assert isinstance(asked, TextBody)
        given: Any = asked.prompt
        is_one = isinstance(given, str) or all(isinstance(item, int) for item in given)
        prompts = [given] if is_one else given
        return [encode_prompt(prompt, self.engine.tokenizer) for prompt in prompts]

    def chat_of(self, conversation: Conversation, owner: str = "") -> ChatPrompt:
        """Prompt of a conversation. Raises `InputError`."""
        return ChatPrompt(conversation, self.engine, self.replay, owner)

    def parsed(self, body: bytes, kind: type[M]) -> M:
        """The fields of a body. Unknown ones that ask for something are refused, or ignored with a
        warning. Raises `InputError`, and `ApiError` for another model."""
        content = read_object(body)
        for name in [name for name in content if name not in kind.model_fields]:
            value = content[name]
            if value and name not in IGNORED and value != NEUTRAL.get(name):
                if self.ignored is None:
                    continue  # the model refuses it
                if name not in self.ignored and len(self.ignored) < MAX_WARNINGS:
                    self.ignored.add(name)
                    log.warning("the field %r is ignored: this server does not know it", name[:60])
            del content[name]
        asked = checked(kind, content)
        if asked.model is not None:
            self.check_model(asked.model)
        return asked

    def check_model(self, name: str) -> None:
        """Raises `ApiError` for another model's name."""
        if name not in self.names:
            message = f"model {shorten(repr(name), 60)} is not served; use {self.names[0]}"
            raise ApiError(404, "model_not_found", message)

    def tokenize(self, asked: TokenizeBody) -> Json:
        """Answer of /tokenize. Raises `InputError`."""
        tokenizer = self.engine.tokenizer
        encode = tokenizer.encode if asked.add_special_tokens else tokenizer.encode_marked
        ids = self.chat_of(asked).token_ids if asked.messages else encode(asked.prompt)
        return {"count": len(ids), "max_model_len": self.context, "tokens": ids}

    def detokenize(self, asked: DetokenizeBody) -> Json:
        """Answer of /detokenize. Raises `InputError`."""
        num_tokens = self.engine.config.vocab_size
        if not all(0 <= token < num_tokens for token in asked.tokens):
            refuse(asked, "tokens", f"it must be a list of token ids, from 0 to {num_tokens - 1}")
        return {"prompt": self.engine.tokenizer.decode(asked.tokens)}
