"""Grammars as a user writes them, checked; `text/matcher.py` compiles them."""

import json
from dataclasses import dataclass, field
from typing import Any

from minitri.core.errors import check_unicode, explain
from minitri.core.fields import brief, check_fields, one_of, refuse

MAX_CHARACTERS = 1 << 17
"""Longest text of a grammar, in characters; schemas in use have at most 100 KB."""
MAX_KEYS = 5000
"""Most keys of a schema, or rules in Lark: llguidance's time may grow with the square of them."""


@dataclass(frozen=True)
class Grammar:
    """A constraint on the whole output, such as `Grammar("regex", "[0-9]+")`."""

    __repr__ = brief
    label = "the grammar's "
    kind: str = one_of("json_object", "json_schema", "json_object", "regex", "lark", "choice")
    """`json_object`: any JSON object; `choice`: one of several texts."""
    text: str = ""
    """The schema as JSON, the regular expression, the Lark grammar, or the texts as a JSON list."""
    start: Any = field(default=None, repr=False, compare=False)  # compiled by `text/matcher.py`

    def __str__(self) -> str:
        return self.kind

    def __post_init__(self) -> None:
        check_fields(self)
        check_unicode(self.text, f"the {self.kind}")
        num_keys = self.text.count('":' if self.kind == "json_schema" else ":")
        if len(self.text) > MAX_CHARACTERS or num_keys > MAX_KEYS:
            most = f"{MAX_CHARACTERS} characters, and {MAX_KEYS} keys or rules"
            refuse(self, "text", f"it must have at most {most}")
        if (self.kind == "json_object") != (not self.text):
            refuse(self, "text", f"it must be {'empty' if self.text else 'given'} for {self.kind}")
        if self.kind == "json_schema":
            _parsed(self.text, "the schema", "an object of JSON", dict | bool)
        elif self.kind == "choice":
            texts = _parsed(self.text, "the choice", "a list of texts", list)
            if not texts or not all(isinstance(it, str) and it for it in texts):
                refuse(self, "text", "it must be a JSON list of texts that are not empty")


def _parsed(text: str, what: str, wanted: str, kind: Any) -> Any:
    """The value of a JSON text. Raises `InputError` unless the value is of this kind."""
    with explain(f"{what} cannot be read", f"give {wanted}"):
        value = json.loads(text)
        if not isinstance(value, kind):
            raise ValueError(f"it is {type(value).__name__}")
    return value
