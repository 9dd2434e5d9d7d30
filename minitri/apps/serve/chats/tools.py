"""Tools of a request: functions that the model may call, and the grammar that its calls follow."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2

from minitri import InputError
from minitri.apps.serve.bodies.chat_body import Conversation, Function
from minitri.apps.serve.chats.answer_parser import FORMATS, ToolFormat
from minitri.core.errors import shorten

SPACES = r"[ \n]{0,16}"
"""White space within arguments: without a limit some models never end it."""
NO_PARAMETERS = {"type": "object", "properties": {}}
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("grammars")),
    undefined=jinja2.StrictUndefined,
)
"""Grammars by the names of formats; `quoted` makes a string of Lark."""
TEMPLATES.filters["quoted"] = json.dumps


@dataclass(frozen=True)
class Tools:
    """Functions of a request, and whether the answer calls one."""

    functions: Mapping[str, Function]
    """All functions, by their names."""
    choice: str
    """auto, none, required, or the name of the function to call."""
    is_parallel: bool
    """Whether an answer may have several calls."""

    @classmethod
    def of(cls, asked: Conversation) -> "Tools":
        functions = {tool.function.name: tool.function for tool in asked.tools}
        return cls(functions, asked.called, asked.parallel_tool_calls)

    @property
    def for_template(self) -> list[Any]:
        """Functions as chat templates know them; none if none is to be called."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": function.description,
                    "parameters": function.parameters or NO_PARAMETERS,
                },
            }
            for name, function in self.functions.items()
            if self.choice != "none"
        ]

    @property
    def names(self) -> list[str]:
        """Functions that may be called."""
        if self.choice in self.functions:
            return [self.choice]
        return [*self.functions] if self.choice != "none" else []

    def grammar(
        self, form: ToolFormat, controls: Mapping[str, int], *, thinks: bool, may_think: bool
    ) -> str:
        """Grammar of the whole answer in llguidance's Lark dialect, or "" where anything goes.

        `controls` are the tags that are tokens, with their ids. `thinks`: the prompt has opened a
        thought; `may_think`: the answer may open one. Raises `InputError`."""
        if not self.names:
            return ""
        if find_spec("llguidance") is None:
            if self.choice == "auto" and self.is_parallel:
                return ""
            name = "tool_choice" if self.is_parallel else "parallel_tool_calls"
            raise InputError(f"{name} needs llguidance; install minitri[grammar], or leave it out")

        def tag(text: str) -> str:
            return f"<[{controls[text]}]>" if text in controls else json.dumps(text)

        return TEMPLATES.get_template(f"{form.name}.lark").render(
            form=form,
            controls=controls,
            tag=tag,
            functions={name: self._schema(name) for name in self.names},
            is_auto=self.choice == "auto",
            is_parallel=self.is_parallel and self.choice not in self.functions,
            thinks=thinks,
            may_think=may_think,
        )

    def _schema(self, name: str) -> str:
        """JSON Schema of a function's arguments, or of any object if llguidance cannot hold that
        one. Raises `InputError` if the client wants it strict."""
        from llguidance import LLMatcher

        function = self.functions[name]
        how = {"lenient": not function.strict, "whitespace_pattern": SPACES}
        text = json.dumps((function.parameters or {}) | {"type": "object", "x-guidance": how})
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
        if problem and function.strict:
            got = f"tools has {name}, whose parameters cannot be held ({shorten(problem)})"
            raise InputError(f"{got}; simplify them, or leave strict out")
        return json.dumps({"type": "object", "x-guidance": how}) if problem else text


def format_of(template: str) -> ToolFormat:
    """Format in which a chat template writes calls; Hermes' where it shows none."""
    for form in FORMATS.values():
        if form.opening in template or (form.is_bare and '"parameters"' in template):
            return form
    return FORMATS["hermes"]
