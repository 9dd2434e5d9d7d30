"""Scheduler: which request gets a row of the batch, whose prompt is read, which rows decode.

A run is a sequence of *turns*. A turn reads at most one chunk of one prompt, starts the rows whose
prompts have been read, and decodes one step of the rows that had started before. So a text waits
for at most one chunk between two of its tokens. An open run, which takes requests at any time,
reads short prompts first. The scheduler holds no tensor and calls no model.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minitri.core.requests import CANCELLED, Row
from minitri.core.shape import MemoryShape

OLDEST_EVERY = 4  # chunks, and admissions of a client, of an open run: one is of the oldest request


@dataclass(frozen=True)
class Chunk:
    """Work of a turn: read the next chunk of the prompt of row b."""

    b: int  # row of the batch


@dataclass(frozen=True)
class Start:
    """Work of a turn: sample the first token of these rows, whose prompts have been read."""

    rows: list[int]  # rows of the batch


@dataclass(frozen=True)
class Step:
    """Work of a turn: decode one step of all rows that have started."""


class Scheduler:
    """Waiting and running requests of one run, and the order in which they are served."""

    def __init__(
        self,
        rows: Sequence[Row],
        shape: MemoryShape,
        *,
        is_open: bool = False,
        is_offloaded: bool = False,
        is_captured: bool = False,
    ) -> None:
        """Queues the requests `rows`, which others may follow if `is_open`.
        `is_offloaded`: a closed run reads all prompts first. `is_captured`: rows sample alike."""
        self.running: dict[int, Row] = {}
        """Admitted requests by row of the batch, the oldest first."""
        self.unread: dict[int, int] = {}
        """Tokens left to read of each unfinished prompt, by row of the batch, the oldest first."""
        self.turns: dict[str, tuple[int, int]] = {}
        """For each client the number of the latest admission, and how many it had in all."""
        self._num_places = shape.num_rows
        self._max_chunk = shape.generation.shared_chunk  # tokens; longer prompts count as long
        self._is_open = is_open
        self._is_offloaded = is_offloaded
        self._is_captured = is_captured
        self._waiting = dict.fromkeys(rows, 0)  # each with `_num_admitted` when it was added
        self._num_admitted = 0
        self._num_chunks = 0

    def add(self, row: Row) -> None:
        self._waiting[row] = self._num_admitted

    def cancel(self, number: int) -> None:
        """Drops the waiting request `number`, or marks a running one to leave before a turn."""
        for row in [*self._waiting, *self.running.values()]:
            if row.number == number:
                row.finish_reason = CANCELLED
                self._waiting.pop(row, None)

    @property
    def free_places(self) -> list[int]:
        return [b for b in range(self._num_places) if b not in self.running]

    def next_row(self) -> Row | None:
        """The waiting request to admit next, or None: of the client with the fewest running ones,
        then of that admitted least recently, the oldest request, or in an open run the shortest.
        In an open run unread long prompts take at most half of the batch."""
        if len(self.running) == self._num_places:
            return None
        waiting = [*self._waiting]
        num_rows = Counter(row.request.client for row in self.running.values())
        clients = num_rows.keys() | {row.request.client for row in waiting}
        self.turns = {client: turn for client, turn in self.turns.items() if client in clients}
        num_long = sum(num_left > self._max_chunk for num_left in self.unread.values())
        if self._is_open and num_long >= max(1, self._num_places // 2):
            waiting = [row for row in waiting if len(row.prompt_ids) <= self._max_chunk]

        def rank(row: Row) -> tuple[int, int, int]:
            client = row.request.client
            latest, count = self.turns.get(client, (self._waiting[row], 0))
            is_for_oldest = not self._is_open or count % OLDEST_EVERY == 0
            return num_rows[client], latest, 0 if is_for_oldest else len(row.prompt_ids)

        first = min(waiting, key=rank, default=None)
        filters = {row.request.sampling for row in self.running.values()}
        if not first or (self._is_captured and filters - {first.request.sampling}):
            return None
        return first

    def admit(self, b: int, row: Row) -> None:
        del self._waiting[row]
        self._num_admitted += 1
        _, count = self.turns.get(row.request.client, (0, 0))
        self.turns[row.request.client] = (self._num_admitted, count + 1)
        self.running[b] = row
        self.unread[b] = len(row.prompt_ids)

    def remove(self, b: int) -> None:
        del self.running[b]
        self.unread.pop(b, None)

    def note_read(self, b: int, num_left: int) -> None:
        self.unread[b] = num_left
        if not num_left:
            del self.unread[b]

    def turn(self, active: Sequence[bool]) -> Iterator[Chunk | Start | Step]:
        """Yields the work of one turn. `active[b]`: row b has its first token, and can decode."""
        has_started = [*active]  # before this turn, which changes `active`
        if self.unread:
            yield Chunk(self._next_to_read())
            # A closed run reads all prompts before it starts rows, unless some decode already.
            interleaves = any(has_started) and not self._is_offloaded
            if self.unread and not (self._is_open or interleaves):
                return
        ready = [b for b in self.running if not has_started[b] and b not in self.unread]
        if ready:
            yield Start(ready)
        if any(has_started):
            yield Step()

    def _next_to_read(self) -> int:
        """The row whose prompt is read next: the oldest, or in open runs mostly the shortest."""
        self._num_chunks += 1
        if self._is_open and self._num_chunks % OLDEST_EVERY:
            return min(self.unread, key=self.unread.__getitem__)
        return next(iter(self.unread))
