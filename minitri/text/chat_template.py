"""Chat templates: a conversation as text for a model, by the Jinja template in its files.

Another process renders templates, within limits (`sandbox.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from minitri.core.errors import InputError, explain, shorten
from minitri.text.sandbox import Sandbox

MAX_SECONDS = 5  # processor time for one rendering
MAX_BYTES = 1 << 29  # memory of a rendering process
ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]
"""A message: `role`, of `ROLES`, `content`, and other keys that the model's template reads."""


class ChatTemplate:
    """A model's chat template, ready to render conversations from several threads."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        """Compiles a template; `special_tokens` has the texts of `bos_token` and the like.
        `tool_source` is another template for conversations with tools, if there is one."""
        self._source = source
        self.tool_source = tool_source or source
        self._special_tokens = special_tokens
        self._sandbox = Sandbox("template", MAX_SECONDS, MAX_BYTES)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        """Renders a conversation as text, up to the beginning of the next answer.
        The role developer becomes system if the template does not know it. Raises `InputError`."""
        source = self.tool_source if tools else self._source
        for message in messages:
            if (role := message.get("role", "user")) not in ROLES and str(role) not in source:
                got = f"a message has the role {shorten(repr(role), 60)}"
                raise InputError(f"{got}; give one of {', '.join(ROLES)}")
        if "developer" not in source:
            messages = [
                {**message, "role": "system"} if message.get("role") == "developer" else message
                for message in messages
            ]
        variables = {
            "messages": [*messages],
            "tools": [*tools] or None,
            "documents": None,
            "add_generation_prompt": True,
            **self._special_tokens,
        }
        advice = "give a prompt of plain text, or correct the template"
        with explain("the model's chat template fails", advice):
            return self._sandbox.ask([source, variables])
