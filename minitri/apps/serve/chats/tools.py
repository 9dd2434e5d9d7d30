"""Tools of a request: what the model may call, and the grammar that its calls follow."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from minitri import InputError
from minitri.apps.serve.chats.answer_parser import END_THINK, FORMATS, THINK, ToolFormat
from minitri.core.errors import shorten

CHOICES = ("auto", "none", "required")
NAME = re.compile(rf"(?!({'|'.join(CHOICES)})$)[\w.-]{{1,64}}", re.ASCII)
"""Of a function, which is none of the choices."""
SPACES = r"[ \n]{0,16}"
"""Between the words of arguments: without a limit some models never end them."""
NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tools:
    """The functions of a request, and whether the answer calls one."""

    functions: Mapping[str, Mapping[str, Any]]
    """By their names, as the client describes them."""
    choice: str
    """One of `CHOICES`, or the name of the one to call."""
    is_parallel: bool
    """Whether an answer may have several calls."""

    @property
    def for_template(self) -> list[Any]:
        """As chat templates know them; none if none is to be called."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": it.get("description") or "",
                    "parameters": it.get("parameters") or NO_PARAMETERS,
                },
            }
            for name, it in self.functions.items()
            if self.choice != "none"
        ]

    @property
    def names(self) -> list[str]:
        """Of those that may be called."""
        names = [*self.functions] if self.choice in CHOICES else [self.choice]
        return names if self.choice != "none" else []

    def grammar(
        self, form: ToolFormat, controls: Mapping[str, int], *, thinks: bool, may_think: bool
    ) -> str:
        """What the answer has to be, for llguidance in its Lark dialect, or "" where anything goes.
        Free text up to a call is as it would be without tools. `controls` are tags that are tokens,
        `thinks` and `may_think` whether a thought is open, or may come first. Raises
        `InputError`."""
        if not self.names:
            return ""
        if find_spec("llguidance") is None:
            if self.choice == "auto" and self.is_parallel:
                return ""
            name = "tool_choice" if self.is_parallel else "parallel_tool_calls"
            raise InputError(f"{name} needs llguidance; install minitri[grammar], or leave it out")

        def tag(text: str) -> str:
            shown = f"<[{controls[text]}]>" if text in controls else json.dumps(text)
            return f"SPACE {shown}" if text else ""

        def until(rule: str, text: str, end: str) -> str:
            if end in controls:
                return f"{rule}: {text} <[{controls[end]}]>"
            to = f"TO_{rule.upper()}"
            return f"{rule}[lazy]: {to}\n{to}: {text} {json.dumps(end)}"

        opening = form.opening
        is_auto = self.choice == "auto"
        excluded = [f"ANY {json.dumps(opening)} ANY"] * (opening not in controls)
        excluded += [r'/\s*\{\s*"(name|type|id)"\s*:/ ANY'] * form.is_bare
        excluded += [r"/\s*<think>/ ANY"] * (may_think and THINK not in controls)
        thought = f"<[{controls[THINK]}]>" if THINK in controls else r"/\s*<think>/"
        thought = "" if thinks else thought
        starts = ["answer"] * (not thinks)
        if thinks or may_think:
            starts += [f"{thought} thought answer", *[f"{thought} THOUGHT"] * is_auto]
        separator = tag(form.separator) or f"{tag(form.closing)} {tag(opening)}"
        more = f"({separator} call)*" if self.is_parallel and self.choice in CHOICES else ""
        answer = f"{'' if form.is_bare else tag(opening)} calls"
        heads = [f'{{"name": "{name}", "{form.arguments}": ' for name in self.names]
        schemas = map(self._schema, self.names)
        calls = [f'HEAD{n} %json {schema} SPACE "}}"' for n, schema in enumerate(schemas)]
        return "\n".join(
            [
                '%llguidance {"allow_invalid_utf8": true}',
                f"start: {' | '.join(starts)}",
                f"answer: {answer}" + " | PLAIN | first calls" * is_auto,
                f"calls: {tag(form.bracket)} call {more} {tag(form.closing)}",
                f"call: {' | '.join(calls)}",
                *(f"HEAD{n}: SPACE {json.dumps(head)}" for n, head in enumerate(heads)),
                r"SPACE: /\s{0,4}/",
                r"ANY: /(?-u:[\x00-\xfe])*/",  # 0xff stands for control tokens
                f'THOUGHT: ANY & ~(ANY "{END_THINK}" ANY)',
                "PLAIN: " + " & ".join(["ANY", *(f"~({it})" for it in excluded)]),
                until("thought", "ANY", END_THINK),
                until("first", "PLAIN", opening),
            ]
        )

    def _schema(self, name: str) -> str:
        """Of the arguments, as far as the library holds it; all of it, if the client wants it
        strict. Raises `InputError`."""
        from llguidance import LLMatcher

        function = self.functions[name]
        how = {"lenient": not function.get("strict"), "whitespace_pattern": SPACES}
        schema = (function.get("parameters") or {}) | {"type": "object", "x-guidance": how}
        text = json.dumps(schema)
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
        if problem and function.get("strict"):
            got = f"tools has {name}, whose parameters cannot be held ({shorten(problem)})"
            raise InputError(f"{got}; simplify them, or leave strict out")
        return json.dumps({"type": "object", "x-guidance": how}) if problem else text


def read_tools(tools: Any, choice: Any, is_parallel: bool | None) -> Tools:
    """Those of a request. Raises `InputError`, which names the field."""
    functions: dict[str, Mapping[str, Any]] = {}
    if not isinstance(tools, Sequence):
        raise InputError(f"tools is {shorten(repr(tools), 60)}; give a list")
    for number, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str(name), **others}} if NAME.fullmatch(
                name
            ) and isinstance(others.get("parameters") or {}, Mapping):
                if name in functions:
                    problem = f"tools[{number}].function.name is {name}, as of another tool"
                    raise InputError(f"{problem}; give each a name of its own")
                functions[name] = tool["function"]
            case _:
                got = f"tools[{number}] is {shorten(repr(tool), 60)}"
                raise InputError(
                    f"{got}; give type function, and a function with a name of at most 64 letters, "
                    "digits, _ . and -, and a schema as parameters"
                )
    match choice:
        case None:
            choice = "auto"
        case {"type": "function", "function": {"name": str(choice)}} if choice in functions:
            pass
        case "auto" | "none":
            pass
        case "required" if functions:
            pass
        case _:
            got = f"tool_choice is {shorten(repr(choice), 60)}"
            raise InputError(f"{got}; give {', '.join(CHOICES)}, or a function that is in tools")
    return Tools(functions, choice, is_parallel is not False)


def format_of(template: str) -> ToolFormat:
    """The one that a chat template writes calls in; Hermes' where it shows none."""
    for form in FORMATS.values():
        if form.opening in template or (form.is_bare and '"parameters"' in template):
            return form
    return FORMATS["hermes"]
