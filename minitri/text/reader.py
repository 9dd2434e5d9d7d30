"""The text of a row: decodes its tokens, and looks for stop strings in what they say."""

from collections.abc import Container, Sequence

from minitri.text.text_stream import IncrementalDecoder, StopScanner
from minitri.text.tokenizer import Tokenizer


class TextReader:
    """A `minitri.core.requests.Reader`: the text of one output, token by token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        *,
        stop: Sequence[str] = (),
        shown: Container[int] = (),
    ) -> None:
        """The output ends before any of the strings `stop`; `shown` are control tokens that its
        text spells out, where others are left out."""
        self._decoder = IncrementalDecoder(tokenizer, prompt_ids, shown)
        self._scanner = StopScanner(stop)

    def __call__(self, token: int | None) -> tuple[str, bool]:
        """Text that is final now, and whether a stop string is complete. None is the end of the
        output: half characters become U+FFFD, and what could have begun a stop string is text."""
        decoded = self._decoder.flush() if token is None else self._decoder.push(token)
        text = self._scanner.push(decoded)
        if token is None:
            text += self._scanner.flush()
        return text, self._scanner.found
