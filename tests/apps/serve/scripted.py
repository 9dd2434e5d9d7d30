"""A run that says what a test wants, token by token, in the place of a model."""

from collections import deque

from minitri.core.requests import Event, Idle, Request
from minitri.core.stats import Stats
from minitri.text.rows import make_row


class ScriptedRun:
    """For a server: answers each request with the next text."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self.tokenizer = engine.tokenizer
        self.texts: deque[str] = deque()
        """Texts to say; without any the answer is empty."""
        self.requests: list[Request] = []
        self._events: deque[Event] = deque()

    @property
    def prompt(self) -> list[int]:
        """Token ids of the last prompt."""
        return list(self.requests[-1].prompt)

    def written(self, ids: list[int]) -> str:
        """A text with its control tokens."""
        return self.tokenizer.decode(ids, shown={0, 1, 2})

    def submit(self, request: Request) -> int:
        row = make_row(len(self.requests), request, self._engine.model, self.tokenizer)
        self.requests.append(request)
        ids = self.tokenizer.encode_marked(self.texts.popleft() if self.texts else "")
        for token in [*ids, 2]:
            self._events.append(row.push(token, "bonus", (2,)))
            if row.finish_reason is not None:
                break
        self._events.append(row.end(Stats()))
        return row.number

    def cancel(self, number: int) -> None:
        self._events = deque(event for event in self._events if event.row != number)

    def close(self) -> None:
        pass

    def __next__(self) -> Event:
        return self._events.popleft() if self._events else Idle()
