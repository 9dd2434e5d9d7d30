"""The text of a chat's answer as what it says: thinking, content and calls of tools.

Text comes in pieces, cut anywhere, and goes on at once, but for what may be the beginning of a tag;
pieces that are put together are what the whole text gives. What is no call stays content: nothing
is lost. Arguments are passed on as the model writes them, without a look at what they say.
"""

import itertools
import json
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import NamedTuple

from minitri.text.text_stream import overlap

THINK = "<think>"
END_THINK = "</think>"


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls: JSON objects with a name and arguments, and tags."""

    opening: str
    """Stands before a call, or before all calls."""
    closing: str
    """Stands after it, or after all of them."""
    arguments: str
    """What the object calls them."""
    bracket: str = ""
    """Stands after the opening."""
    separator: str = ""
    """Stands between objects, if no tags do."""
    is_bare: bool = False
    """Whether the opening may be missing where an answer begins."""


FORMATS = {
    "mistral": ToolFormat("[TOOL_CALLS]", "]", "arguments", bracket="[", separator=","),
    "hermes": ToolFormat("<tool_call>", "</tool_call>", "arguments"),
    "llama3": ToolFormat("<|python_tag|>", "", "parameters", separator=";", is_bare=True),
}


class Piece(NamedTuple):
    """What a piece of text adds to an answer."""

    kind: str
    """`content`, `reasoning`, `call` (a new one, with its name) or `arguments` (of the latest)."""
    text: str


class AnswerParser:
    """Reads one answer."""

    def __init__(
        self, form: ToolFormat | None = None, names: Collection[str] = (), *, thinks: bool = False
    ) -> None:
        """`names` are those of the tools; without a format nothing is a call. `thinks`: the prompt
        has opened a thought."""
        self._form = form
        starts = itertools.product(('{"name":"', '{"type":"function","name":"'), names)
        keys = ("arguments", "parameters")
        self._heads = [f'{start}{name}","{key}":{{' for start, name in starts for key in keys]
        self._rest = ""  # text that has not been passed on
        self._is_last = False
        self._found: list[Piece] = []
        self._steps = self._read(thinks)

    def push(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Takes in a piece of text; returns what is certain now, all of it after the last one."""
        self._rest += text
        self._is_last = is_last
        next(self._steps, None)
        found = self._found
        self._found = []
        return found

    def _read(self, thinks: bool) -> Generator[None, None, None]:
        """The whole answer; waits for text at each `yield`."""
        if thinks or (yield from self._take(THINK)):
            yield from self._skip_spaces()
            yield from self._pass_to(END_THINK, "reasoning")
            yield from self._skip_spaces()
        opening = self._form.opening if self._form else ""
        taken = (yield from self._take(opening)) if opening else ""
        may_call = bool(taken or (self._form and self._form.is_bare))
        while self._rest or taken or not self._is_last:
            if may_call and (yield from self._calls(taken)):
                taken = yield from self._take(opening)
                may_call = bool(taken)
            else:
                taken = yield from self._pass_to(opening, "content")
                may_call = True

    def _calls(self, taken: str) -> Generator[None, None, bool]:
        """Calls after a tag, which is content if there are none. Whether there are."""
        assert self._form is not None
        is_call = False
        heads = self._heads
        if self._form.bracket:
            bracket = yield from self._take(self._form.bracket)
            taken += bracket
            heads = heads if bracket else []
        while head := (yield from self._take(*heads)):
            is_call = True
            self._found.append(Piece("call", json.loads("".join(head.split()) + "}}")["name"]))
            self._rest = "{" + self._rest
            yield from self._pass_arguments()
            if (yield from self._take(',"id":"')):
                yield from self._pass_to('"')
            yield from self._take("}")
            taken = self._form.separator and (yield from self._take(self._form.separator))
            if not taken:
                yield from self._take(self._form.closing)
                yield from self._skip_spaces()
                break
        self._add("content", taken)
        return is_call

    def _take(self, *texts: str) -> Generator[None, None, str]:
        """Takes the one of these texts that comes next, spaces apart; returns it with them, and
        nothing if none comes."""
        seen = ""
        at = 0
        while True:
            for character in self._rest[at:]:
                at += 1
                seen += character.strip()
                if not any(text.startswith(seen) for text in texts):
                    return ""
                if seen in texts:
                    taken = self._rest[:at]
                    self._rest = self._rest[at:]
                    return taken
            if self._is_last:
                return ""
            yield

    def _skip_spaces(self) -> Generator[None, None, None]:
        while not (rest := self._rest.lstrip()) and not self._is_last:
            yield
        self._rest = rest

    def _pass_to(self, tag: str, kind: str = "") -> Generator[None, None, str]:
        """Passes on text up to a tag, or to the end; of no kind, drops it. Returns the tag, if it
        comes."""
        while True:
            at = self._rest.find(tag) if tag else -1
            held = 0 if self._is_last else overlap(self._rest, tag)
            text = self._rest[: len(self._rest) - held if at < 0 else at]
            self._rest = self._rest[len(text) :]
            self._add(kind, text)
            if at >= 0 or self._is_last:
                self._rest = self._rest.removeprefix(tag)
                return tag if at >= 0 else ""
            yield

    def _pass_arguments(self) -> Generator[None, None, None]:
        """Passes on an object, by its brackets and strings."""
        depth = 0
        is_string = is_escaped = False
        while True:
            for at, character in enumerate(self._rest, 1):
                if is_escaped:
                    is_escaped = False
                elif is_string:
                    is_string = character != '"'
                    is_escaped = character == "\\"
                else:
                    is_string = character == '"'
                    depth += (character in "{[") - (character in "}]")
                    if not depth:
                        self._add("arguments", self._rest[:at])
                        self._rest = self._rest[at:]
                        return
            self._add("arguments", self._rest)
            self._rest = ""
            if self._is_last:
                return
            yield

    def _add(self, kind: str, text: str) -> None:
        if kind and text:
            self._found.append(Piece(kind, text))
