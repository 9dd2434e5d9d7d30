"""OpenAI's API: bodies of the endpoints as pydantic models, the `Request`s of the texts that they
ask for, and errors.

The models check the bodies, and /docs.json has their schemas. Most names are OpenAI's, others
vLLM's, such as `top_k`, `min_p` and `ignore_eos`; `speculation` and `details` are minitri's."""

import json
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AliasChoices, BeforeValidator, Field

from minitri import Engine, GenerationConfig, Grammar, InputError, Request, SamplingParams
from minitri.apps.cli.arguments import field_texts
from minitri.apps.cli.documents import read_apart
from minitri.apps.cli.report import Json, json_line
from minitri.apps.serve.chats.chat_body import ApiError, Body, Conversation, Many, Message, checked
from minitri.apps.serve.chats.chat_prompt import ChatPrompt
from minitri.core.errors import MAX_COUNT, FaultError, explain, shorten
from minitri.core.fields import changed, refuse
from minitri.core.settings import MAX_ROWS
from minitri.files.hf_config import without_null
from minitri.text import matcher, prompt_ids

Texts = str | Many[str]
Number = float | None
Whole = int | None
LENGTHS = AliasChoices("max_tokens", "max_completion_tokens", "max_output_tokens")
VLLM = {"json": "json_schema", "choice": "choice", "regex": "regex", "grammar": "lark"}
"""By vLLM's name of a form: kind of its `Grammar`."""
NOTES = {"name", "description", "strict"}  # fields of a response_format that change nothing here
FORMS = AliasChoices("response_format", "structured_outputs", "text")
STOP_CHARACTERS = 1024  # in all stop strings: each is looked for after every token


def like(name: str) -> Any:
    """Optional field with the bounds and help text of a field of `SamplingParams`."""
    least, most = SamplingParams.__dataclass_fields__[name].metadata.get("range", (None, None))
    return Field(None, ge=least, le=most, description=field_texts(SamplingParams)[name])


def read_form(form: Json | None) -> Grammar | None:
    """Grammar for a `response_format`, OpenAI's or vLLM's; None: text. Raises `InputError`."""
    given = without_null(form or {"type": "text"})
    for name in ("format", "json_schema"):  # which hold the rest at /v1/responses, or in a chat
        if isinstance(given.get(name), dict):
            given |= without_null(given.pop(name))
    kind = given.pop("type", None)
    match kind, *(field for field in given.items() if field[0] not in NOTES):
        case ["text"]:
            return None
        case ["json_object"]:
            return Grammar("json_object")
        case ["json_object", ("schema", dict(schema))]:
            return Grammar("json_schema", {"type": "object", **schema})
        case ["json_schema", ("schema", schema)]:
            return Grammar("json_schema", json.dumps(schema))
        case [None, ("json" | "choice" as name, text)] | [None, (name, str(text))] if name in VLLM:
            return Grammar(VLLM[name], text)
    raise InputError(f"response_format is {shorten(json.dumps(form), 60)}; see its forms at /docs")


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    """End the stream with counts of tokens."""


class Fields(Body):
    """Fields that the bodies of all endpoints with a text as answer have."""

    id_prefix: ClassVar[str]
    object_type: ClassVar[str]  # OpenAI's `object` of the answer
    default_length: ClassVar[int] = MAX_COUNT  # if the client gives none: as many as fit
    model: str = ""
    """One of the names at /v1/models. Default: the first."""
    temperature: Number = like("temperature")
    top_k: Whole = like("top_k")
    top_p: Number = like("top_p")
    min_p: Number = like("min_p")
    repetition_penalty: Number = like("repetition_penalty")
    presence_penalty: Number = like("presence_penalty")
    frequency_penalty: Number = like("frequency_penalty")
    logit_bias: dict[str, float] | None = like("logit_bias")
    bad_words: Texts | None = like("bad_words")
    min_tokens: Whole = like("min_tokens")
    max_tokens: Whole = Field(None, ge=1, le=MAX_COUNT, validation_alias=LENGTHS)
    """Most tokens of the answer, also as max_completion_tokens or max_output_tokens. Default: 16,
    of a chat as many as the context has room for."""
    stop: Texts = ()
    """A text, or a list of texts, before which the answer ends. At most 1024 characters in all."""
    ignore_eos: bool = False
    """Go on after a token that ends the text."""
    seed: Whole = Field(None, ge=-(1 << 63), le=(1 << 64) - 1)
    """Seed of the random numbers, by default drawn: a request has one answer per seed, whatever was
    asked before or runs next to it, unless the server has --no-coupled, or a GPU rounds otherwise.
    Its higher and lower 32 bits are combined by exclusive or, and i is added for answer i."""
    n: int = Field(1, ge=1, le=MAX_ROWS)
    """How many answers to each prompt."""
    stream: bool = False
    """Send the answer in pieces, as they are made."""
    stream_options: StreamOptions = StreamOptions()
    """Whether a stream ends with counts of tokens."""
    details: bool = False
    """In a stream, add how much of the prompt is read, and which model guessed each token."""
    speculation: bool = True
    """Let tokens be guessed; the answer's distribution stays the same."""
    safety_identifier: str = ""
    """Name of the end user. With API keys, cached prompts are reused for the same one only."""
    user: str = ""
    """Name of the end user if there is no safety_identifier."""
    prompt_cache_key: str = ""
    """Name of the end user if there is no user."""
    response_format: Json | None = Field(None, validation_alias=FORMS)
    """Form of the answer: of type text, json_object, or json_schema, with a schema; or in vLLM's
    words, also as structured_outputs: json (a schema), regex, choice, or grammar (Lark). At
    /v1/responses also as the format of text. At most 131072 characters, 3000 keys or rules, and a
    second to compile. Next to tools JSON only, of answers that call none."""


class TextBody(Fields):
    """Body of /v1/completions."""

    id_prefix = "cmpl-"
    object_type = "text_completion"
    default_length = 16
    prompt: str | Many[int] | Many[str | Many[int]] = ""
    """A text, a list of token ids, or a list of such prompts, which are answered in this order."""
    num_logprobs: Whole = Field(None, ge=0, le=20, validation_alias="logprobs")
    """Add log-probabilities: of each token, and of this many that are likeliest."""


class ChatBody(Fields, Conversation):
    """Body of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_type = "chat.completion"
    logprobs: bool = False
    """Add log-probabilities."""
    top_logprobs: Whole = Field(None, ge=0, le=20)
    """Add log-probabilities: of each token, and of this many that are likeliest."""

    @property
    def num_logprobs(self) -> Whole:
        return self.top_logprobs or (0 if self.logprobs else None)


def messages_of(items: Any) -> object:
    """Converts `items`, the `input` of /v1/responses, to chat messages. Raises `ValueError`."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Json] = []
    for item in items if isinstance(items, list) else [items]:
        match item:
            case {"type": "reasoning"}:
                pass
            case {"type": "function_call", "call_id": call_id}:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                call = {"id": call_id, "function": item}
                messages[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "call_id": call_id, "output": content}:
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case {"role": _, "content": _} if item.get("type", "message") == "message":
                messages.append(
                    {name: item[name] for name in item if name not in ("type", "id", "status")}
                )
            case _:
                raise ValueError("give a text, or a list of messages and calls")
    return messages


class ResponseBody(Fields, Conversation):
    """Body of /v1/responses."""

    id_prefix = "resp_"
    object_type = "response"
    num_logprobs: ClassVar[None] = None
    messages: Annotated[
        Many[Message], BeforeValidator(messages_of, json_schema_input_type=str | Many[Json])
    ] = Field(min_length=1, validation_alias="input")
    """A text, or a list of items: messages of texts, calls of functions and their results; items of
    reasoning are left out."""
    n: Literal[1] = 1
    """How many answers."""
    details: Literal[False] = False
    """Not at this endpoint."""


Asked = TextBody | ChatBody | ResponseBody


class Call(NamedTuple):
    """One call of an endpoint: texts to generate, the body that asks for them, a chat's prompt."""

    requests: list[Request]
    asked: Asked
    chat: ChatPrompt | None


class Protocol(NamedTuple):
    """Reads bodies of HTTP requests to one model; makes `Request`s of the texts that they want."""

    engine: Engine
    names: list[str]  # of the model; answers have the first
    sampling: SamplingParams  # where a client says nothing
    context: int  # tokens of a prompt and its answer, at most
    lenient: bool  # whether unknown fields are ignored

    def document(self, content: bytes) -> str:
        """JSON with a file's text, its encoding or format, and its number of tokens.
        The number is estimated by the first 32 * `context` characters of a longer text."""
        text, encoding = read_apart(content)
        part = text[: 32 * self.context]
        num_tokens = len(self.engine.tokenizer.encode_marked(part)) * len(text) // len(part)
        return json_line({"text": text, "format": encoding, "num_tokens": num_tokens})

    def model(self, name: str) -> Json:
        """The model as OpenAI's API describes it, by one of its names or "". Raises `ApiError`."""
        if name not in ("", *self.names):
            message = f"model {shorten(repr(name), 60)} is not served; use {self.names[0]}"
            raise ApiError(404, "model_not_found", message, "model")
        about = {"object": "model", "created": 0, "owned_by": "minitri"}
        return {"id": name, **about, "max_model_len": self.context}

    def read(self, body: bytes, kind: type[Asked], client: str, salt: str) -> Call:
        """Makes a `Call` of an HTTP body of this `kind` from the client of this name. Raises
        `InputError`, or `ApiError` with OpenAI's code. With a `salt`, prompts reuse K and V only of
        prompts with the same salt and end user."""
        with explain("the body is no JSON", "send an object"):
            content = json.loads(body)
        asked = checked(kind, content, lenient=self.lenient)
        self.model(asked.model)
        user = asked.safety_identifier or asked.user or asked.prompt_cache_key
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
                owner=salt and f"{salt}/{user!a}",
                client=client,
                shown=chat.shown if chat else (),
            )
            for number, ids in enumerate(ids for ids in prompts for _ in range(asked.n))
        ]
        return Call(requests, asked, chat)

    def compiled(self, call: Call) -> list[Request]:
        """Requests of a call, with their grammar compiled. Raises `InputError`.
        This may take 3 seconds of processor time, so it runs outside of the worker's thread."""
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


def as_api_error(error: Exception) -> ApiError:
    """The HTTP error that reports an exception to the client."""
    match error:
        case ApiError():
            return error
        case InputError():
            # Without settings of the library.
            message = str(InputError(error.message, *(way for way in error.ways if "=" not in way)))
            if isinstance(error, FaultError):
                return ApiError(503, "unavailable", message)
            name = message.split()[0]  # as errors of settings begin
            known = TextBody.model_fields | ChatBody.model_fields
            return ApiError(400, "invalid_request", message, name if name in known else None)
    return ApiError(500, "internal_error", f"a bug: {shorten(repr(error))}; see the server's log")
