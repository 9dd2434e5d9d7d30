"""Parser of a chat's answer: its thinking, content and calls of tools.

Text comes in pieces, cut anywhere, and is passed on at once, except for a possible beginning of a
tag; the pieces of each kind, joined, do not depend on the cuts. Text that is no call stays content:
nothing is lost. Arguments are passed on as the model writes them, valid or not.
"""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from minitri.text.text_stream import overlap

THINK = "<think>"
END_THINK = "</think>"
SIGNS = re.compile(r'\\.|["{}]', re.DOTALL)  # escapes, and what begins or ends texts and objects


@dataclass(frozen=True)
class ToolFormat:
    """Syntax in which a family of models writes calls: JSON objects between tags."""

    name: str
    opening: str  # tag before a call, or before all calls
    closing: str  # tag after a call, or after all calls
    arguments: str  # key of the arguments in a call's object
    bracket: str = ""  # text after the opening
    separator: str = ""  # text between objects, if there are no tags between them
    is_bare: bool = False  # whether the opening may be missing at the beginning of an answer


_TABLE = json.loads(Path(__file__).with_name("formats.json").read_text("utf-8"))
FORMATS = {name: ToolFormat(name, **fields) for name, fields in _TABLE.items()}


class Piece(NamedTuple):
    """Part of an answer, of one kind."""

    kind: str  # content, reasoning_content, call (its name), or arguments (of the latest call)
    text: str


class AnswerParser:
    """Parser of one answer."""

    def __init__(
        self, form: ToolFormat | None = None, names: Collection[str] = (), *, thinks: bool = False
    ) -> None:
        """`names` of the tools; without a format nothing is a call. `thinks`: the prompt has opened
        a thought."""
        self._form = form
        starts = itertools.product(('{"name":"', '{"type":"function","name":"'), names)
        keys = ("arguments", "parameters")
        self._heads = [f'{start}{name}","{key}":{{' for start, name in starts for key in keys]
        self._rest = ""  # text that has not been passed on
        self._is_last = False
        self._pieces: list[Piece] = []
        self._steps = self._read(thinks)

    def push(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Takes in a piece of text; returns what can be passed on, after the last piece all."""
        self._rest += text
        self._is_last = is_last
        next(self._steps, None)
        pieces = self._pieces
        self._pieces = []
        return pieces

    def _read(self, thinks: bool) -> Generator[None, None, None]:
        """Parses an answer, as a coroutine that waits for more text at each `yield`."""
        if thinks or (yield from self._take(THINK)):
            yield from self._skip_spaces()
            yield from self._pass_to(END_THINK, "reasoning_content")
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
        """Reads calls after a tag, which is content if there are none. Whether there are."""
        assert self._form is not None
        bracket = self._form.bracket
        is_call = False
        while head := (yield from self._take(*(bracket + start for start in self._heads))):
            is_call = True
            called = "".join(head.split()).removeprefix(bracket) + "}}"
            bracket = ""
            self._add("call", json.loads(called)["name"])
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
        """Takes the one of these texts that comes next, spaces ignored; returns it with its spaces,
        or nothing if none comes."""
        seen = ""
        num_read = 0
        while True:
            for character in self._rest[num_read:]:
                num_read += 1
                seen += character.strip()
                if not any(text.startswith(seen) for text in texts):
                    return ""
                if seen in texts:
                    return self._cut(num_read)
            if self._is_last:
                return ""
            yield

    def _skip_spaces(self) -> Generator[None, None, None]:
        while not (rest := self._rest.lstrip()) and not self._is_last:
            yield
        self._rest = rest

    def _pass_to(self, tag: str, kind: str = "") -> Generator[None, None, str]:
        """Passes on text up to a tag, or to the end; drops it if it has no kind. Returns the tag,
        if it comes."""
        while True:
            place = self._rest.find(tag) if tag else -1
            held = 0 if self._is_last else overlap(self._rest, tag)
            self._add(kind, self._cut(len(self._rest) - held if place < 0 else place))
            if place >= 0:
                return self._cut(len(tag))
            if self._is_last:
                return ""
            yield

    def _pass_arguments(self) -> Generator[None, None, None]:
        """Streams the arguments of a tool call, up to the end of their JSON object."""
        read = ""
        depth, place, is_text = 0.0, 0, False  # braces that are open, at this place of what is read
        while True:
            read += self._rest
            for sign in SIGNS.finditer(read, place):
                place = sign.end()
                is_text ^= sign[0] == '"'
                depth += 0 if is_text else {"{": 1, "}": -1}.get(sign[0], 0)
                if not depth:
                    break
            end = len(read)
            is_done = self._is_last
            if not depth:
                depth = math.inf  # if it is no JSON: then it is all that follows
                with contextlib.suppress(ValueError, RecursionError):
                    _, end = json.JSONDecoder(strict=False).raw_decode(read)
                    is_done = True
            self._add("arguments", self._cut(len(self._rest) - len(read) + end))
            if is_done:
                return
            place = max(place, len(read) - 1)  # there may be the first half of an escape
            yield

    def _cut(self, num: int) -> str:
        """Takes characters off the rest of the text."""
        text = self._rest[:num]
        self._rest = self._rest[num:]
        return text

    def _add(self, kind: str, text: str) -> None:
        if kind and text:
            self._pieces.append(Piece(kind, text))
