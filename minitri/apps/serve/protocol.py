"""Requests of clients for one model: from the JSON of a body to the `Request` of each text."""

import json
from dataclasses import replace
from typing import Any, NamedTuple

from minitri import Engine, GenerationConfig, Request, SamplingParams
from minitri.apps.cli.documents import read_apart
from minitri.apps.cli.report import json_line
from minitri.apps.serve.api_error import ApiError
from minitri.apps.serve.bodies.chat_body import checked
from minitri.apps.serve.bodies.completion import ChatBody, ResponseBody, TextBody, read_form
from minitri.apps.serve.chats.chat_prompt import ChatPrompt
from minitri.core.errors import explain, shorten
from minitri.core.fields import changed, refuse
from minitri.files.hf_config import without_null
from minitri.text import matcher, prompt_ids

Asked = TextBody | ChatBody | ResponseBody
STOP_CHARACTERS = 1024  # in all stop strings: each is looked for after every token


class Call(NamedTuple):
    """One call of an endpoint: texts to generate, and how to word the answer."""

    requests: list[Request]
    asked: Asked
    chat: ChatPrompt | None


class Protocol(NamedTuple):
    """Reads bodies of requests for one model."""

    engine: Engine
    names: list[str]  # of the model; answers have the first
    sampling: SamplingParams  # where a client says nothing
    context: int  # tokens of a prompt and its answer, at most
    lenient: bool  # whether unknown fields are ignored

    def document(self, content: bytes) -> str:
        """JSON with a file's text, its format, and how many tokens it has.
        Estimated by the first 32 characters for each token of the context if there are more."""
        text, encoding = read_apart(content)
        part = text[: 32 * self.context]
        num_tokens = len(self.engine.tokenizer.encode_marked(part)) * len(text) // len(part)
        return json_line({"text": text, "format": encoding, "num_tokens": num_tokens})

    def read(self, body: bytes, kind: type[Asked], client: str, salt: str) -> Call:
        """Makes a `Call` of an HTTP body. Raises `InputError`, or `ApiError` with OpenAI's code.
        Prompts share the cache only with those of the same salt."""
        with explain("the body is no object of JSON", "send an object"):
            content = {**json.loads(body)}
        asked = checked(kind, content, lenient=self.lenient)
        if asked.model not in ("", *self.names):
            message = f"model {shorten(repr(asked.model), 60)} is not served; use {self.names[0]}"
            raise ApiError(404, "model_not_found", message)
        user = asked.safety_identifier or asked.user or asked.prompt_cache_key
        owner = salt and f"{salt}/{user!a}"
        if isinstance(asked, TextBody):
            chat = None
            texts = prompt_ids.split_prompts(asked.prompt)
            prompts = [prompt_ids.encode_prompt(text, self.engine.tokenizer) for text in texts]
        else:
            chat = ChatPrompt(asked, self.engine)
            prompts = [chat.token_ids]
        given = without_null(vars(asked)) | {"grammar": read_form(asked.response_format)}
        sampling = changed(self.sampling, given)
        seed = prompt_ids.draw_seed() if asked.seed is None else asked.seed % (1 << 64)
        requests = [
            Request(
                ids,
                prompt_ids.next_seed(seed ^ seed >> 32, number),
                sampling,
                self.generation_of(asked, len(ids)),
                speculation=asked.speculation,
                owner=owner,
                client=client,
                shown=chat.shown if chat is not None else (),
            )
            for number, ids in enumerate(ids for ids in prompts for _ in range(asked.n))
        ]
        return Call(requests, asked, chat)

    def compiled(self, call: Call) -> list[Request]:
        """Requests of a call, with their grammar compiled. Raises `InputError`.
        This may take 3 seconds of processor time; no step of other requests waits for it."""
        sampling = call.requests[0].sampling
        grammar: Any = call.chat.grammar(sampling.grammar) if call.chat else sampling.grammar
        start = matcher.compiled(grammar, self.engine.tokenizer, self.engine.config)
        sampling = replace(sampling, grammar=replace(grammar, start=start))
        return [replace(request, sampling=sampling) for request in call.requests]

    def generation_of(self, asked: Asked, num_prompt_tokens: int) -> GenerationConfig:
        """Length, stop strings and log-probabilities that a request asks for.
        Raises `ApiError` if the context has no room."""
        if sum(map(len, asked.stop)) > STOP_CHARACTERS:
            refuse(asked, "stop", f"it must have at most {STOP_CHARACTERS} characters in all")
        room = self.context - num_prompt_tokens
        num_new = asked.max_tokens or max(1, min(room, asked.default_length))
        if num_new > room:
            got = f"{num_prompt_tokens} + {num_new} tokens exceed {self.context}"
            text = f"{got}; shorten the prompt, or lower max_tokens"
            raise ApiError(400, "context_length_exceeded", text)
        return GenerationConfig(num_new, asked.stop, asked.ignore_eos, asked.num_logprobs)
