"""Bodies of the endpoints as pydantic models, which check them; /docs.json has their schemas.

Names and defaults are OpenAI's; `top_k`, `min_p`, `ignore_eos`, `speculation`, `details` and
`continue_final_message` are additions.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from minitri import Grammar, InputError, SamplingParams
from minitri.apps.cli.arguments import field_texts
from minitri.apps.cli.report import Json
from minitri.apps.serve.bodies.chat_body import Body, Conversation, Many, Message
from minitri.core.errors import MAX_COUNT, shorten
from minitri.core.settings import MAX_ROWS
from minitri.files.hf_config import without_null

Texts = str | Many[str]
LENGTHS = AliasChoices("max_tokens", "max_completion_tokens", "max_output_tokens")
VLLM: Any = {
    "json": ("json_schema", dict | str),
    "choice": ("choice", list),
    "regex": ("regex", str),
    "grammar": ("lark", str),
}
"""Kinds of grammars, and types of their texts, by vLLM's names."""
NOTES = {"name", "description", "strict"}  # fields of a form that change nothing here
FORMS = AliasChoices("response_format", "structured_outputs", "text")


def like(name: str) -> Any:
    """Optional field with the bounds and help text of a field of `SamplingParams`."""
    field = SamplingParams.__dataclass_fields__[name]
    least, most = field.metadata.get("range", (None, None))
    return Field(None, ge=least, le=most, description=field_texts(SamplingParams)[name])


def read_form(form: Json | None) -> Grammar | None:
    """Grammar for the form of an answer, in OpenAI's words or in vLLM's. Raises `InputError`."""
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
        case [None, (name, text)] if name in VLLM and isinstance(text, VLLM[name][1]):
            return Grammar(VLLM[name][0], text)
    raise InputError(f"the form is {shorten(repr(form), 60)}; see response_format at /docs")


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
    temperature: float | None = like("temperature")
    top_k: int | None = like("top_k")
    top_p: float | None = like("top_p")
    min_p: float | None = like("min_p")
    repetition_penalty: float | None = like("repetition_penalty")
    presence_penalty: float | None = like("presence_penalty")
    frequency_penalty: float | None = like("frequency_penalty")
    logit_bias: dict[str, float] | None = like("logit_bias")
    bad_words: Texts | None = like("bad_words")
    min_tokens: int | None = like("min_tokens")
    max_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, validation_alias=LENGTHS)
    """Most tokens of the answer, also as max_completion_tokens or max_output_tokens. Default: 16,
    of a chat as many as the context has room for."""
    stop: Texts = ()
    """A text, or a list of texts, before which the answer ends. At most 1024 characters in all."""
    ignore_eos: bool = False
    """Go on after a token that ends the text."""
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 64) - 1)
    """Seed of the random numbers, by default drawn: a request has one answer per seed, whatever was
    asked before or runs next to it, unless the server has --no-coupled, or a GPU rounds otherwise.
    Answer i has that of seed + i. The two halves of its 64 bits are combined by exclusive or."""
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
    """The end user. With keys, cached prompts are shared only where this is the same."""
    user: str = ""
    """The end user, if there is no safety_identifier."""
    prompt_cache_key: str = ""
    """The end user, if there is no user."""
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
    """A text, a list of token ids, or a list of these: then each has its answers, in this order."""
    num_logprobs: int | None = Field(None, ge=0, le=20, validation_alias="logprobs")
    """Add log-probabilities: of each token, and of this many that are likeliest."""


class ChatBody(Fields, Conversation):
    """Body of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_type = "chat.completion"
    logprobs: bool = False
    """Add log-probabilities."""
    top_logprobs: int | None = Field(None, ge=0, le=20)
    """Add them, and those of this many tokens that are likeliest."""

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or (0 if self.logprobs else None)


def messages_of(items: Any) -> object:
    """Chat messages from the input of a response; joins calls in a row. Raises `ValueError`."""
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
                about = ("type", "id", "status")
                messages.append({name: item[name] for name in item if name not in about})
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
    """A text, or a list of items: messages of texts, calls of functions and what those gave;
    reasoning is left out."""
    n: Literal[1] = 1
    """How many answers."""
    details: Literal[False] = False
    """Events have none."""
