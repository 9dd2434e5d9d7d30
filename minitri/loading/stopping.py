"""Stop strings: finds them in a stream of text, wherever the borders between tokens fall."""

from collections.abc import Sequence


class StopScanner:
    """Lets text through until a stop string appears; the string and what follows are dropped.

    The stop string that is complete first counts, and of several that end together the longest.
    Text that may be the beginning of a stop string is held back until the next pieces decide.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Takes in a piece; returns what may be shown. Sets `found` at the first stop string."""
        if self.found:
            return ""
        text = self._held + text
        starts = ((text.find(stop), len(stop)) for stop in self._stop)
        ends = [(start + length, start) for start, length in starts if start >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back, once nothing can follow."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)
