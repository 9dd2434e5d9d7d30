"""Parser of a chat's answer: its thinking, content and calls of tools.

Text comes in pieces, cut anywhere, and is passed on at once, except for a possible beginning of a
tag, and for calls, passed on at the end; joined pieces of a kind do not depend on the cuts. By the
grammar of answers calls come last, in one spelling; the length limit may cut their arguments."""

import contextlib
import json
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple

from minitri.text.tokenizer import overlap

THINK = "<think>"
END_THINK = "</think>"
START = '{"name": "'
HEAD = re.compile(re.escape(START) + '([^"]+)", "(?:arguments|parameters)": ')
DECODER = json.JSONDecoder(strict=False)


class ToolFormat(NamedTuple):
    """Syntax in which models of the family `name` write calls: JSON objects after a tag."""

    name: str
    opening: str  # tag before a call, or before all calls
    arguments: str  # key of the arguments in a call's object
    closing: str = ""  # tag after a call
    is_bare: bool = False  # whether the opening may be missing at the beginning of an answer


_TABLE = Path(__file__).with_name("formats.json").read_text("utf-8")
FORMATS = {name: ToolFormat(name, **fields) for name, fields in json.loads(_TABLE).items()}


def format_of(template: str) -> ToolFormat:
    """Format in which a chat template writes calls of tools; that of Hermes if it shows none."""
    for form in FORMATS.values():
        if form.opening in template or (form.is_bare and '"parameters"' in template):
            return form
    return FORMATS["hermes"]


class Piece(NamedTuple):
    """Part of an answer: thinking, content, or a whole call of a tool."""

    kind: str  # content, reasoning_content, or call
    text: str  # of a call the arguments
    name: str = ""  # of the function that is called


class AnswerParser:
    """Parser of one answer of a chat, which takes its text in pieces."""

    def __init__(self, form: ToolFormat | None = None, *, thinks: bool = False) -> None:
        """Makes a parser of calls in this `form`, if any. `thinks`: the prompt ends in <think>."""
        self._form = form
        self._rest = ""  # text that has not been passed on
        self._is_last = False
        self._steps = self._read(thinks)

    def push(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Takes text; returns the pieces that are final now, which are all if `is_last`."""
        self._rest += text
        self._is_last = is_last
        return [*iter(self._steps.__next__, None)]  # up to where it waits for more text

    def _read(self, thinks: bool) -> Iterator[Piece | None]:
        """Parses an answer (`thinks`: after <think>): yields pieces, None to wait for more text."""
        if thinks or (yield from self._take(THINK)):
            yield from self._take("")
            yield from self._pass_to(END_THINK, "reasoning_content")
            yield from self._take("")
        taken = ""
        if form := self._form:
            taken = yield from self._take(START if form.is_bare else form.opening)
        if not taken:
            taken = yield from self._pass_to(form.opening if form else "", "content")
        while not self._is_last:
            yield None
        yield from calls_in(taken + self._rest)

    def _take(self, tag: str) -> Generator[None, None, str]:
        """Removes white space and a tag from the text, if these come next; returns them or "".
        Yields None while the text so far does not decide it."""
        while tag.startswith(head := self._rest.lstrip()) and not self._is_last:
            yield None
        return self._cut(len(self._rest) - len(head) + len(tag)) if head.startswith(tag) else ""

    def _pass_to(self, tag: str, kind: str) -> Generator[Piece | None, None, str]:
        """Yields text up to a tag or the end, in pieces of this kind, and None to wait for more
        text; returns the tag, or "" at the end."""
        while True:
            place = self._rest.find(tag) if tag else -1
            held = 0 if self._is_last else overlap(self._rest, tag)
            if text := self._cut(len(self._rest) - held if place < 0 else place):
                yield Piece(kind, text)
            if place >= 0:
                return self._cut(len(tag))
            if self._is_last:
                return ""
            yield None

    def _cut(self, num: int) -> str:
        """Removes `num` characters from the text that is not parsed yet, and returns them."""
        text = self._rest[:num]
        self._rest = self._rest[num:]
        return text


def calls_in(text: str) -> Iterator[Piece]:
    """Yields the calls of tools in the last part of an answer; if there are none, its content."""
    place = 0
    while head := HEAD.search(text, place):
        place = len(text)  # the end of arguments that are cut
        with contextlib.suppress(ValueError, RecursionError):
            _, place = DECODER.raw_decode(text, head.end())
        yield Piece("call", text[head.end() : place], head[1])
    if text and not place:
        yield Piece("content", text)
