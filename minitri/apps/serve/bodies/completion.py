"""Bodies of the endpoints as pydantic models, which check them; their JSON schemas are at /docs.

Names and defaults are OpenAI's; `top_k`, `min_p`, `ignore_eos`, `speculation`, `details` and
`continue_final_message` are additions.
"""

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from minitri import Grammar, InputError, SamplingParams
from minitri.apps.cli.arguments import field_texts
from minitri.apps.serve.bodies.chat_body import Body, Conversation, Json, Many, checked
from minitri.core.errors import MAX_COUNT, shorten
from minitri.core.fields import refuse
from minitri.core.settings import MAX_ROWS
from minitri.files.hf_config import without_null

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Texts = str | Many[str]
STOP_CHARACTERS = 1024  # in all stop strings: each is looked for after every token
GRAMMARS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark"}
"""Kinds of `minitri.Grammar`, by vLLM's names."""
NOTES = {"name", "description", "strict"}  # fields of a form that change nothing here


def like(name: str) -> Any:
    """Optional field with the bounds and the help of one of `SamplingParams`."""
    field = SamplingParams.__dataclass_fields__[name]
    least, most = field.metadata.get("range", (None, None))
    return Field(None, ge=least, le=most, description=field_texts(SamplingParams)[name])


def read_form(form: object) -> Grammar | None:
    """Grammar of a form in OpenAI's words, or in vLLM's. Raises `ValueError`."""
    given = without_null(form) if isinstance(form, dict) else {}
    kind = given.pop("type", None)
    if kind == "json_schema":
        if isinstance(inner := given.get("json_schema"), dict) and len(given) == 1:
            given = without_null(inner)
        given = {name: value for name, value in given.items() if name not in NOTES}
    match kind, *given.items():
        case ["text"]:
            return None
        case ["json_object"]:
            return Grammar("json_object")
        case ["json_object", ("schema", dict(schema))]:
            return Grammar("json_schema", json.dumps({"type": "object", **schema}))
        case ["json_schema", ("schema", schema)]:
            return Grammar("json_schema", json.dumps(schema))
        case [None, (name, str(text))] if name in GRAMMARS:
            return Grammar(GRAMMARS[name], text)
        case [None, ("json" | "choice" as name, value)]:
            return Grammar(GRAMMARS[name], json.dumps(value))
    raise ValueError("see /docs for what it may be")


Form = Annotated[Grammar | None, BeforeValidator(read_form, json_schema_input_type=Json)]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    """End the stream with counts of tokens."""


class Fields(Body):
    """Fields of all endpoints that answer with a text."""

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
    max_tokens: Count | None = None
    """Most tokens of the answer. Default: 16, of a chat as many as the context has room for."""
    max_completion_tokens: Count | None = None
    """Newer name of max_tokens, before which it counts."""
    max_output_tokens: Count | None = None
    """Name of max_tokens at /v1/responses, before which it counts."""
    stop: Texts = ()
    """A text, or a list of texts, before which the answer ends. At most 1024 characters in all."""
    ignore_eos: bool = False
    """Go on after a token that ends the text."""
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 64) - 1)
    """Seed of the random numbers, by default drawn: a request has one answer per seed; answer i has
    that of seed + i. The two halves of its 64 bits are combined by exclusive or."""
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
    response_format: Form = None
    """Form of the answer: of type text, json_object, or json_schema, with a schema."""
    structured_outputs: Form = None
    """Form of the answer in vLLM's words: json (a schema), regex, choice, or grammar (Lark)."""

    @model_validator(mode="after")
    def _check_stop(self) -> Self:
        if sum(map(len, self.stop)) > STOP_CHARACTERS:
            refuse(self, "stop", f"it must have at most {STOP_CHARACTERS} characters in all")
        return self

    @property
    def length(self) -> int | None:
        """Most new tokens of an answer, if the client says so."""
        return self.max_output_tokens or self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens get log-probabilities at each position; None: none at all."""
        return None

    @property
    def forms(self) -> dict[str, Grammar]:
        """Forms of the answer, by the names of their fields."""
        return {name: form for name, form in vars(self).items() if isinstance(form, Grammar)}


class TextBody(Fields):
    """Body of /v1/completions."""

    id_prefix = "cmpl-"
    object_type = "text_completion"
    default_length = 16
    prompt: str | Many[int] | Many[str | Many[int]] = ""
    """A text, a list of token ids, or a list of these: then each has its answers, in this order."""
    logprobs: int | None = Field(None, ge=0, le=20)
    """Add log-probabilities: of each token, and of this many that are likeliest."""

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatBody(Fields, Conversation):
    """Body of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object_type = "chat.completion"
    logprobs: bool = False
    """Add log-probabilities."""
    top_logprobs: int | None = Field(None, ge=0, le=20)
    """Add them, and those of this many tokens that are likeliest."""

    def conversation(self, **_: bool) -> Conversation:
        """Messages and tools."""
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or (0 if self.logprobs else None)


class TextForm(Body):
    """Form of the answer's text."""

    format: Form = None
    """An object of type text, json_object, or json_schema, with a schema."""


class ResponseBody(Fields):
    """Body of /v1/responses."""

    id_prefix = "resp_"
    object_type = "response"
    input: str | Many[Json] = ""
    """A text, or a list of items: messages of texts, calls of functions and what those gave;
    reasoning is left out."""
    instructions: str = ""
    """A message of the system, before the input."""
    text: TextForm = TextForm()
    """Form of the answer, such as {"format": {"type": "text"}}."""
    tools: Many[Json] = ()
    """Functions that may be called; tools of other types are left out."""
    tool_choice: str | Json = "auto"
    """Whether functions are called: auto, none, required, or which one."""
    parallel_tool_calls: bool = True
    """Whether several may be called."""
    n: int = Field(1, ge=1, le=1)
    """How many answers."""
    details: Literal[False] = False
    """Events have none."""

    @property
    def forms(self) -> dict[str, Grammar]:
        form = self.text.format
        return super().forms | ({} if form is None else {"text": form})

    def conversation(self, *, lenient: bool = False) -> Conversation:
        """Messages and tools. Raises `InputError`, for unknown fields only if not `lenient`."""
        tools = [
            {"type": "function", "function": tool}
            for tool in self.tools
            if tool.get("type") == "function"
        ]
        content = self.model_dump(include={"tool_choice", "parallel_tool_calls"})
        content |= {"messages": self._messages(), "tools": tools}
        return checked(Conversation, content, lenient=lenient)

    def _messages(self) -> list[Json]:
        """Messages of the chat; calls that follow one another are of one message."""
        items = self.input
        if isinstance(items, str):
            items = ({"role": "user", "content": items},)
        messages: list[Json] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for item in items:
            match item:
                case {"type": "reasoning"}:
                    pass
                case {"type": "function_call", "call_id": call_id, "name": name, "arguments": text}:
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant"})
                    call = {"id": call_id, "function": {"name": name, "arguments": text}}
                    messages[-1].setdefault("tool_calls", []).append(call)
                case {"type": "function_call_output", "call_id": call_id, "output": output}:
                    messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
                case {"role": _, "content": _} if item.get("type", "message") == "message":
                    about = ("type", "id", "status")
                    messages.append({name: v for name, v in item.items() if name not in about})
                case _:
                    raise InputError(f"input has {shorten(repr(item), 60)}; give messages or calls")
        return messages
