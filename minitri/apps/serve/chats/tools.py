"""Format of tool calls in a model's chat template, and the grammar that calls follow."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import jinja2

from minitri import InputError
from minitri.apps.serve.bodies.chat_body import Conversation, Function
from minitri.apps.serve.chats.answer_parser import FORMATS, ToolFormat
from minitri.core.errors import shorten

SPACES = r"[ \n]{0,16}"  # within arguments: without a limit some models never end them
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("grammars")),
    undefined=jinja2.StrictUndefined,
)
"""Grammars by the names of formats; `quoted` makes a string of Lark."""
TEMPLATES.filters["quoted"] = json.dumps


def calls_grammar(
    asked: Conversation,
    form: ToolFormat,
    controls: Mapping[str, int],
    *,
    thinks: bool,
    may_think: bool,
) -> str:
    """Grammar of the whole answer in llguidance's Lark dialect, or "" where anything goes.

    `controls` are the tags that are tokens, with their ids. `thinks`: the prompt has opened a
    thought; `may_think`: the answer may open one. Raises `InputError`."""
    functions = asked.callable_functions
    is_auto = asked.tool_choice == "auto"
    is_parallel = asked.parallel_tool_calls
    if not functions:
        return ""
    if find_spec("llguidance") is None:
        if is_auto and is_parallel:
            return ""
        name = "tool_choice" if is_parallel else "parallel_tool_calls"
        raise InputError(f"{name} needs llguidance; install minitri[grammar], or leave it out")

    def tag(text: str) -> str:
        return f"<[{controls[text]}]>" if text in controls else json.dumps(text)

    return TEMPLATES.get_template(f"{form.name}.lark").render(
        form=form,
        controls=controls,
        tag=tag,
        functions={name: schema_of(function) for name, function in functions.items()},
        is_auto=is_auto,
        is_parallel=is_parallel and asked.tool_choice not in functions,
        thinks=thinks,
        may_think=may_think,
    )


def schema_of(function: Function) -> str:
    """JSON Schema of a function's arguments, or of any object if llguidance cannot hold that one.
    Raises `InputError` if the client wants it strict."""
    from llguidance import LLMatcher

    how = {"lenient": not function.strict, "whitespace_pattern": SPACES}
    text = json.dumps(function.parameters | {"type": "object", "x-guidance": how})
    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    if problem and function.strict:
        got = f"tools has {function.name}, whose parameters cannot be held ({shorten(problem)})"
        raise InputError(f"{got}; simplify them, or leave strict out")
    return json.dumps({"type": "object", "x-guidance": how}) if problem else text


def format_of(template: str) -> ToolFormat:
    """Format in which a chat template writes calls; Hermes' where it shows none."""
    for form in FORMATS.values():
        if form.opening in template or (form.is_bare and '"parameters"' in template):
            return form
    return FORMATS["hermes"]
