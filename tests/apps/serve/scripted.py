"""A run that says what it is told, token by token, in the place of a model."""

from collections import deque

from minitri.core.requests import Event, Idle, Request, Row
from minitri.core.stats import Stats
from minitri.text.rows import make_row
from minitri.text.tokenizer import Tokenizer


def say(
    row: Row,
    tokenizer: Tokenizer,
    text: str,
    *,
    tokens: list[int] | None = None,
    ends: int = 2,
) -> list[Event]:
    """The events of a row that says this text, in the tokens that are given, and ends."""
    ids = tokenizer.encode_marked(text) if tokens is None else tokens
    events: list[Event] = []
    for token in [*ids, ends]:
        events.append(row.push(token, "bonus", (ends,)))
        if row.finish_reason is not None:
            break
    return [*events, row.end(Stats())]


class ScriptedRun:
    """For a server: answers each request with the next text."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self.texts: deque[str] = deque()
        self.prompts: list[list[int]] = []
        """Token ids of those that came."""
        self.requests: list[Request] = []
        self._events: deque[Event] = deque()

    def submit(self, request: Request) -> int:
        number = len(self.prompts)
        row = make_row(number, request, self._engine.model, self._engine.tokenizer)
        self.prompts.append(row.prompt_ids)
        self.requests.append(request)
        self._events += say(row, self._engine.tokenizer, self.texts.popleft())
        return number

    def cancel(self, number: int) -> None:
        self._events = deque(it for it in self._events if it.row != number)

    def close(self) -> None:
        pass

    def __next__(self) -> Event:
        return self._events.popleft() if self._events else Idle()
