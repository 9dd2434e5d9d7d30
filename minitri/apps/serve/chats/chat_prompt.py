"""Prompt of a chat: its messages in the form of the model's template, and the grammar of calls.

Templates take plain texts, and the arguments of calls as objects."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

import jinja2

from minitri import Engine, Grammar, InputError
from minitri.apps.cli.report import Json
from minitri.apps.serve.chats.answer_parser import END_THINK, THINK, AnswerParser, format_of
from minitri.apps.serve.chats.chat_body import Conversation, Function, Message
from minitri.core.errors import explain, shorten
from minitri.core.fields import refuse
from minitri.text.matcher import probe, schema_text

GRAMMARS = jinja2.Environment(
    loader=jinja2.PackageLoader("minitri.apps.serve.chats", "grammars"),
    undefined=jinja2.StrictUndefined,
)


class ChatPrompt:
    """Prompt of a chat, in the form of the model's template, and the parser of its answer."""

    def __init__(self, asked: Conversation, engine: Engine) -> None:
        """Renders and tokenizes the conversation in a request's body. Raises `InputError`."""
        tokenizer = engine.tokenizer
        choice = asked.tool_choice
        offered = () if choice == "none" else asked.tools
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type", "strict"})}
            for tool in offered
        ]
        may_call = () if asked.continue_final_message else offered
        self.functions = {f.name: f for f in may_call if choice in ("auto", "required", f.name)}
        if not self.functions and choice not in ("auto", "none"):
            refuse(asked, "tool_choice", "give auto, none, required, or a function in tools")
        turns = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
        turns += read_turns(asked.messages)
        self._begun = turns.pop()["content"] if asked.continue_final_message else ""
        source = tokenizer.tool_template or tokenizer.chat_template
        has_calls = any(turn.keys() & {"tool_calls", "tool_call_id"} for turn in turns)
        if source and "tools" not in source and (has_calls or tools):
            raise InputError("the chat template leaves tools out; use a model such as qwen2.5-1.5b")
        form = format_of(source)
        turns = [*one_call_each(turns)] if form.is_bare else turns
        text = tokenizer.render_chat(turns, tools)
        self.token_ids = tokenizer.encode_marked(text) + tokenizer.encode_marked(self._begun)
        self._form = form if self.functions else None
        tags = [THINK, END_THINK]
        if self.functions:
            tags += [form.opening, form.closing]
        controls = tokenizer.control_ids(tags)
        self.shown = frozenset(controls.values())
        self._rules: Json = {  # variables of the grammar's template
            "thinks": text.rstrip().endswith(THINK),
            "may_think": THINK in source,
            "controls": controls,
            "is_auto": choice == "auto",
            "is_parallel": asked.parallel_tool_calls and choice not in self.functions,
        }

    def grammar(self, form: Grammar | None) -> Grammar | None:
        """Grammar of answers that call functions or have `form`, if given. Raises `InputError`."""
        if not self._form:
            return form
        if form and not form.kind.startswith("json"):
            raise InputError("response_format is no JSON, next to tools; leave one of them out")
        with explain("response_format cannot be held", "simplify it"):
            reply = form and schema_text(form.text or '{"type": "object"}')
        schemas = schemas_of(self.functions)
        text = GRAMMARS.get_template(f"{self._form.name}.lark").render(
            form=self._form, functions=schemas, reply=reply, **self._rules
        )
        try:
            return Grammar("lark", text)
        except InputError as error:
            largest = max(schemas, key=lambda name: len(schemas[name]))
            raise InputError(f"tools are too much, above all {largest}: {error.message}") from None

    def parser(self) -> AnswerParser:
        """Parser of the answer; it has read the last message if the answer is to continue that."""
        made = AnswerParser(self._form, thinks=self._rules["thinks"])
        made.push(self._begun)
        return made


def read_turns(messages: Sequence[Message]) -> list[Json]:
    """Converts a request's messages to the form that chat templates take."""
    turns = []
    names = {}  # of functions, by the ids of their calls
    for message in messages:
        if message.role == "user" and "content" not in message.model_fields_set:
            raise InputError("messages has one of the role user without content; give it a text")
        given = message.model_dump(exclude={"name"}).items()
        turn = {key: value for key, value in given if value or key in ("role", "content")}
        for call in turn.get("tool_calls", ()):
            call["id"] = short_id(call["id"])
            names[call["id"]] = call["function"]["name"]
        if message.role == "tool":
            call_id = short_id(message.tool_call_id)
            turn |= {"tool_call_id": call_id, "name": names.get(call_id, "")}
        turns.append(turn)
    return turns


def short_id(call_id: str) -> str:
    """Makes an id of nine letters and digits from a tool call's id, as Mistral's template wants."""
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def one_call_each(turns: Sequence[Json]) -> Iterator[Json]:
    """Splits messages with several calls into one for each, for templates that demand that."""
    for turn in turns:
        calls = turn.get("tool_calls", ())
        yield turn | {"tool_calls": calls[:1]} if calls else turn
        for call in calls[1:]:
            yield {"role": "assistant", "content": "", "tool_calls": [call]}


def schemas_of(functions: Mapping[str, Function]) -> dict[str, str]:
    """JSON Schemas of functions' arguments, by function name. One that is too hard for llguidance
    is replaced by that of any object or, if the function is strict, raises `InputError`."""
    from llguidance import LLMatcher

    schemas = {}
    for name, function in functions.items():
        schema = json.dumps(function.parameters | {"type": "object"})
        try:
            schemas[name] = schema_text(schema, lenient=not function.strict)
            problem = probe(LLMatcher.grammar_from_json_schema(schemas[name]))
        except (TypeError, ValueError) as error:
            problem = str(error)
        if problem and function.strict:
            got = f"tools has {name}, whose parameters cannot be held ({shorten(problem)})"
            raise InputError(f"{got}; simplify them, or leave strict out")
        if problem:
            schemas[name] = schema_text('{"type": "object"}', lenient=True)
    return schemas
