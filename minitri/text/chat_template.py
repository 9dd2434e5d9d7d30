"""Chat templates: a conversation as text for a model, by the Jinja template in its files.

Another process renders templates, within limits (`sandbox.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from minitri.core.errors import InputError, explain, shorten
from minitri.text.sandbox import Sandbox

SANDBOX = Sandbox("render", 5, 1 << 29)  # 5 s and 512 MiB
ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]
"""A message: `role`, of `ROLES`, `content`, and other keys that the model's template reads."""


class ChatTemplate(NamedTuple):
    """A model's chat template, which renders conversations from several threads."""

    source: str
    special_tokens: Mapping[str, str]  # texts of `bos_token` and the like
    tool_source: str | None = None  # another template, for conversations with tools

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        """Renders a conversation as text, up to the beginning of the next answer.
        The role developer becomes system if the template does not know it. Raises `InputError`."""
        source = (tools and self.tool_source) or self.source
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
            **self.special_tokens,
        }
        advice = "give a prompt of plain text, or correct the template"
        with explain("the model's chat template fails", advice):
            return SANDBOX.ask([source, variables])
