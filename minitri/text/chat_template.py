"""Chat templates: a conversation as text for a model, by the Jinja template in its files.

Another process renders templates, within limits (`template_sandbox.py`), and waits for more.
"""

import json
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from minitri.core.errors import InputError, explain, shorten

PROGRAM = Path(__file__).with_name("template_sandbox.py")
MAX_SECONDS = 5.0  # processor time for one rendering
MAX_BYTES = 1 << 29  # memory of a rendering process
ADVICE = "give a prompt of plain text, or correct the template"
ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]
"""A message: `role`, of `ROLES`, `content`, and other keys that the model's template reads."""


class ChatTemplate:
    """A model's chat template, ready to render conversations from several threads."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        """`special_tokens` has the texts of `bos_token` and the like; `tool_source` is another
        template for conversations with tools, if there is one. Raises `InputError`."""
        self._source = source
        self.tool_source = tool_source or source
        self._special_tokens = special_tokens
        self._idle: list[Popen[str]] = []
        self._owner = os.getpid()
        weakref.finalize(self, stop, self._idle)
        with explain("the model's chat template is not valid", ADVICE):
            self._ask(source, {})

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str:
        """A conversation as text, up to the beginning of the next answer. Raises `InputError`. The
        role developer becomes system for a template that does not know it."""
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
        variables = {"messages": [*messages], "add_generation_prompt": True}
        variables |= {"tools": [*tools] or None, "documents": None, **self._special_tokens}
        with explain("the model's chat template fails", ADVICE):
            return self._ask(source, variables)

    def _ask(self, source: str, variables: Mapping[str, object]) -> str:
        """Lets a process render a template with these variables. Raises `ValueError`."""
        if self._owner != os.getpid():  # after a fork the processes are the parent's
            self._owner = os.getpid()
            self._idle.clear()
        try:
            child = self._idle.pop()
        except IndexError:  # the first rendering, or other threads use all processes
            child = start()
        line = ""
        with suppress(BrokenPipeError):
            print(json.dumps([source, variables]), file=child.stdin, flush=True)
            line = child.stdout.readline() if child.stdout else ""
        if line and not self._idle:
            self._idle.append(child)
        else:
            stop([child])
        if not line:
            raise ValueError(f"it takes more than {MAX_SECONDS:g} seconds, or too much memory")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]


def start() -> Popen[str]:
    """A new process that renders templates. Raises `InputError` where nothing can limit it."""
    if not find_spec("resource"):
        problem = "chat templates run within limits of a process, which this system does not have"
        raise InputError(f"{problem}; write the prompt without --chat, or use Linux, macOS or WSL")
    return Popen(
        [sys.executable, "-P", PROGRAM, str(MAX_SECONDS), str(MAX_BYTES)],
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C ends minitri, not a rendering
    )


def stop(children: list[Popen[str]]) -> None:
    """Ends rendering processes; after a fork, not those of the parent process."""
    for child in children:
        with suppress(OSError), child:
            child.kill()
