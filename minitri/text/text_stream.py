"""Streamed text: whole characters of new tokens, up to the first stop string."""

import functools
import os.path
from collections.abc import Container, Sequence

from minitri.text.tokenizer import Tokenizer


class TextReader:
    """Turns one output's tokens into text with stop strings; a `minitri.core.requests.Reader`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        *,
        stop: Sequence[str] = (),
        shown: Container[int] = (),
    ) -> None:
        """The output ends before the first of the strings `stop`; `shown` are ids of control tokens
        that the text spells out, while others are left out."""
        self._decoder = IncrementalDecoder(tokenizer, prompt_ids, shown)
        self._scanner = StopScanner(stop)

    def __call__(self, token: int | None) -> tuple[str, bool]:
        """Takes a token; returns the text that is final now, and whether a stop string is complete.
        None ends the output: half characters become U+FFFD, a half stop string becomes text."""
        decoded = self._decoder.flush() if token is None else self._decoder.push(token)
        text = self._scanner.push(decoded)
        if token is None:
            text += self._scanner.flush()
        return text, self._scanner.found


class StopScanner:
    """A filter of streamed text, which ends it before the first complete stop string.

    Text that may be the beginning of a stop string is held back."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Takes the next piece of text; returns what can be shown, up to any stop string. Sets
        `found` at the first stop string."""
        if self.found:
            return ""
        text = self._held + text
        starts = ((text.find(stop), len(stop)) for stop in self._stop)
        ends = [(start + length, start) for start, length in starts if start >= 0]
        if ends:
            self.found = True
            self._held = ""
            return text[: min(ends)[1]]
        cut = len(text) - max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the output."""
        held = self._held
        self._held = ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest string that ends `text` and begins `stop`."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class IncrementalDecoder:
    """A detokenizer for a growing sequence: the text of new tokens, piece by piece.

    The text of a token depends on its neighbours: a leading space, a character of several tokens.
    So each step decodes a short window of tokens twice, with and without the new ones; the
    difference is the new text. A window that ends in U+FFFD may end in half a character; its text
    waits for at most `MAX_WAITING` tokens, as every token costs another decoding of the window.
    """

    CONTEXT = 6
    """Tokens of the prompt that are decoded before the first new token."""
    MAX_WAITING = 16
    """Most tokens whose text waits: four times as many as one character may have."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], shown: Container[int] = ()) -> None:
        """`prompt` are ids before the output; `shown` are control tokens that text spells out."""
        self._decode = functools.partial(tokenizer.decode, shown=shown)
        self._ids = prompt[-self.CONTEXT :]
        self._window = 0  # first token of the window
        self._read = len(self._ids)  # first token of which no text was returned
        self._num_held = 0  # characters just before this token that were not returned, either

    def push(self, token: int) -> str:
        """Takes the next token; returns the text that is final now, which may be empty."""
        self._ids.append(token)
        text = self._decode(self._ids[self._window :])
        num_broken = len(text) - len(text.rstrip("\ufffd"))
        if num_broken and len(self._ids) - self._read < self.MAX_WAITING:
            return ""
        return self.flush(min(num_broken, 3))  # a character may continue after three bytes

    def flush(self, num_held: int = 0) -> str:
        """Returns all text not returned yet but its last `num_held` characters; broken characters
        become U+FFFD."""
        known = self._decode(self._ids[self._window : self._read])
        known = known[: len(known) - self._num_held]
        text = self._decode(self._ids[self._window :])
        if num_held:  # in the next window, or they would be lost
            num_held = min(num_held, len(self._decode(self._ids[self._read :])))
        text = text[: len(text) - num_held]
        self._num_held = num_held
        self._window = self._read
        self._read = len(self._ids)
        # Not just text[len(known):]: a prompt may end inside a character, then `known` in U+FFFD.
        return text[len(os.path.commonprefix((known, text))) :]  # noqa: RUF071
