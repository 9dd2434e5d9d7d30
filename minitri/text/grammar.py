"""Grammars as a user writes them, checked; `text/matcher.py` compiles them."""

import json
from dataclasses import dataclass, field
from typing import Any

from minitri.core.errors import check_unicode, explain
from minitri.core.fields import brief, check_fields, one_of, refuse

MAX_CHARACTERS = 1 << 17
"""Longest text of a grammar, in characters; schemas in use have at most 100 KB."""
MAX_KEYS = 3000
"""Most keys of a schema, or rules in Lark: llguidance's time may grow with the square of them."""


@dataclass(frozen=True)
class Grammar:
    """A constraint on the whole output, such as `Grammar("regex", "[0-9]+")`."""

    __repr__ = brief
    label = "the grammar's "
    kind: str = one_of("json_object", "json_schema", "json_object", "regex", "lark", "choice")
    """`json_object`: any JSON object; `choice`: one of several texts."""
    text: Any = ""
    """By `kind`: a schema (JSON, dict, pydantic class), "", a regex, Lark, or a list of texts."""
    start: Any = field(default=None, repr=False, compare=False)  # llguidance's matcher, if compiled

    def __str__(self) -> str:
        return self.kind

    def __post_init__(self) -> None:
        check_fields(self)
        text = self.text
        if hasattr(text, "model_json_schema"):  # a class of pydantic
            text = text.model_json_schema()
        if isinstance(text, dict | list):
            with explain("the grammar is no JSON", "give dictionaries, lists, texts and numbers"):
                text = json.dumps(text)
        if not isinstance(text, str):
            refuse(self, "text", "it must be a text, a dictionary, a list or a class of pydantic")
        object.__setattr__(self, "text", text)
        check_unicode(text, f"the {self.kind}")
        num_keys = text.count('":' if self.kind == "json_schema" else ":")
        if len(text) > MAX_CHARACTERS or num_keys > MAX_KEYS:
            most = f"{MAX_CHARACTERS} characters, and {MAX_KEYS} keys or rules"
            refuse(self, "text", f"it must have at most {most}")
        if (self.kind == "json_object") != (not text):
            refuse(self, "text", f"it must be {'empty' if text else 'given'} for {self.kind}")
        if wanted := {"json_schema": dict | bool, "choice": list}.get(self.kind):
            with explain(f"the {self.kind} cannot be read", "give JSON, an object or a list"):
                value = json.loads(text)
                if not isinstance(value, wanted):
                    raise ValueError(f"it is {type(value).__name__}")
            if self.kind == "choice" and not all(isinstance(it, str) and it for it in value or [0]):
                refuse(self, "text", "it must be a JSON list of texts that are not empty")
