"""Streamed text: whole characters of new tokens, up to the first stop string."""

import codecs
from collections.abc import Container, Sequence
from dataclasses import dataclass

from minitri.text.tokenizer import Tokenizer


class TextReader:
    """Turns one output's tokens into text with stop strings; a `minitri.core.requests.Reader`."""

    CONTEXT = 6
    """Tokens of the prompt whose bytes may begin a character of the output, or its first space."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        *,
        stop: Sequence[str] = (),
        shown: Container[int] = (),
    ) -> None:
        """The output ends before the first of the strings `stop`, which may be control tokens;
        `shown` are ids of control tokens that the text spells out, while others are left out."""
        self._tokenizer, self._shown = tokenizer, shown
        self._scanner = StopScanner(stop)
        self._stop_ids = {*tokenizer.control_ids(stop).values()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        before = tokenizer.text_bytes(prompt_ids[-self.CONTEXT :], shown)
        self._decoder.decode(before)
        self._is_broken = bool(self._decoder.getstate()[0])  # the prompt ends inside a character
        self._strips = tokenizer.strips_space and not before

    def __call__(self, token: int | None) -> tuple[str, bool]:
        """Takes a token; returns the text that is final now, and whether a stop string is complete.
        None ends the output: half characters become U+FFFD, a half stop string becomes text."""
        is_stop = token in self._stop_ids
        tokens = [] if token is None or is_stop else [token]
        data = self._tokenizer.text_bytes(tokens, self._shown)
        if self._strips and data:
            data, self._strips = data.removeprefix(b" "), False
        text = self._decoder.decode(data, not tokens)
        if self._is_broken and text:  # U+FFFD for what is cut is part of the prompt
            text, self._is_broken = text.removeprefix("\ufffd"), False
        text = self._scanner.push(text)
        if not tokens:
            text += self._scanner.flush()
        return text, self._scanner.found or is_stop


@dataclass
class StopScanner:
    """A filter of streamed text, which ends it before the first complete stop string.

    Text that may be the beginning of a stop string is held back."""

    stop: Sequence[str]
    held: str = ""
    found: bool = False

    def push(self, text: str) -> str:
        """Takes the next piece of text; returns what can be shown, up to any stop string. Sets
        `found` at the first stop string."""
        if self.found:
            return ""
        text = self.held + text
        starts = ((text.find(stop), len(stop)) for stop in self.stop)
        ends = [(start + length, start) for start, length in starts if start >= 0]
        if ends:
            self.found = True
            self.held = ""
            return text[: min(ends)[1]]
        cut = len(text) - max((overlap(text, stop) for stop in self.stop), default=0)
        self.held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the output."""
        held = self.held
        self.held = ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest string that ends `text` and begins `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
