"""Streamed text: whole characters of new tokens, up to the first stop string."""

import codecs
from collections.abc import Container, Sequence

from minitri.text.tokenizer import Tokenizer


class StreamDetokenizer:
    """Turns one output's tokens into text with stop strings: the core's `Detokenizer`."""

    CONTEXT = 6  # last prompt tokens that are decoded first: the output may complete a character

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        *,
        stop: Sequence[str] = (),
        shown: Container[int] = (),
    ) -> None:
        """Makes a detokenizer of an output that ends before the first of the strings `stop`.
        `shown` are ids of control tokens that the text spells out, while others are left out."""
        self._tokenizer, self._shown = tokenizer, shown
        self._stop = stop
        self._held = ""  # what may begin a stop string
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
        text = self._held + text
        starts = ((text.find(stop), len(stop)) for stop in self._stop)
        ends = [(start + length, start) for start, length in starts if start >= 0]
        if ends:  # the first stop string that is complete
            return text[: min(ends)[1]], True
        held = max((overlap(text, stop) for stop in self._stop), default=0) if tokens else 0
        self._held = text[len(text) - held :]
        return text[: len(text) - held], is_stop


def overlap(text: str, stop: str) -> int:
    """Length of the longest string that ends `text` and begins `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
