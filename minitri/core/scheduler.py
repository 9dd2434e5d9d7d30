"""Scheduler: which request gets a row of the batch, whose prompt is read, which rows decode.

`Generation` works in *turns*. A turn reads at most one chunk of one prompt, starts the rows whose
prompts have been read, and decodes one step if rows had started before. So a text waits for at most
one chunk between two of its tokens. An open run, which takes requests at any time, reads short
prompts first. The scheduler holds no tensor and calls no model.
"""

from collections import Counter
from collections.abc import Sequence

from minitri.core.requests import RequestState
from minitri.core.shape import MemoryShape

OLDEST_EVERY = 4
"""In an open run every 4th chunk, and every 4th admission of a client, is of the oldest request;
the others are of the shortest."""


class Scheduler:
    """Waiting and running requests of one run, and the order in which they are served."""

    def __init__(
        self,
        requests: Sequence[RequestState],
        shape: MemoryShape,
        *,
        is_open: bool = False,
        is_offloaded: bool = False,
    ) -> None:
        """Queues the first requests of a run of this `shape`; if `is_open` others may follow.
        `is_offloaded`: K and V are in host memory."""
        self.admitted = dict[int, RequestState]()
        """Admitted requests by row of the batch, the oldest first."""
        self.unread = dict[int, int]()
        """Tokens left to read of each unfinished prompt, by row of the batch, the oldest first."""
        self.latest_admissions = dict[str, tuple[int, int]]()
        """By client: when it was last admitted, counted over all clients, and how often it was."""
        self._num_rows = shape.num_rows
        self._max_chunk = shape.generation.shared_chunk  # tokens; longer prompts count as long
        self._is_open = is_open
        self._is_offloaded = is_offloaded
        self._waiting = dict.fromkeys(requests, 0)  # number of admissions before each came
        self._num_admitted = 0
        self._num_chunks = 0

    def add(self, state: RequestState) -> None:
        self._waiting[state] = self._num_admitted

    def cancel(self, number: int) -> None:
        """Drops the request of this number if it waits, else marks it to end before a new turn."""
        for state in [*self._waiting, *self.admitted.values()]:
            if state.number == number:
                state.finish_reason = "cancelled"
                self._waiting.pop(state, None)

    @property
    def free_rows(self) -> list[int]:
        return [b for b in range(self._num_rows) if b not in self.admitted]

    def next_request(self) -> RequestState | None:
        """The waiting request to admit next, or None if none can be admitted now.
        First come clients with the fewest rows of the batch, then the client whose latest admission
        was longest ago; of a client the oldest request. If `is_open` mostly the shortest, and
        unread prompts longer than `shared_chunk` get at most half of the batch."""
        if len(self.admitted) == self._num_rows:
            return None
        waiting = [*self._waiting]
        num_rows = Counter(state.request.client for state in self.admitted.values())
        clients = num_rows.keys() | {state.request.client for state in waiting}
        for client in self.latest_admissions.keys() - clients:
            del self.latest_admissions[client]
        num_long = sum(num_left > self._max_chunk for num_left in self.unread.values())
        if self._is_open and num_long >= max(1, self._num_rows // 2):
            waiting = [state for state in waiting if len(state.prompt_ids) <= self._max_chunk]

        def rank(state: RequestState) -> tuple[int, int, int]:
            client = state.request.client
            # A client without admissions ranks as if admitted when its request came.
            latest, count = self.latest_admissions.get(client, (self._waiting[state], 0))
            is_for_oldest = not self._is_open or count % OLDEST_EVERY == 0
            return num_rows[client], latest, 0 if is_for_oldest else len(state.prompt_ids)

        return min(waiting, key=rank, default=None)

    def admit(self, b: int, state: RequestState) -> None:
        del self._waiting[state]
        self._num_admitted += 1
        _, count = self.latest_admissions.get(state.request.client, (0, 0))
        self.latest_admissions[state.request.client] = (self._num_admitted, count + 1)
        self.admitted[b] = state
        self.unread[b] = len(state.prompt_ids)

    def remove(self, b: int) -> None:
        del self.admitted[b]
        self.unread.pop(b, None)

    def note_read(self, b: int, num_left: int) -> None:
        self.unread[b] = num_left
        if not num_left:
            del self.unread[b]

    def next_to_read(self) -> int | None:
        """The row of the batch whose prompt is read next, or None if all prompts are read.
        The oldest request, or if `is_open` mostly the one with the fewest tokens to read."""
        if not self.unread:
            return None
        self._num_chunks += 1
        if self._is_open and self._num_chunks % OLDEST_EVERY:
            return min(self.unread, key=self.unread.__getitem__)
        return next(iter(self.unread))

    def reads_first(self, active: Sequence[bool]) -> bool:
        """Whether unread prompts are read before any row starts or decodes. Not if `is_open`, or
        a row decodes (`active[b]`) with K and V on the device: chunks and steps alternate then."""
        interleaves = self._is_open or (any(active) and not self._is_offloaded)
        return bool(self.unread) and not interleaves

    def ready(self, active: Sequence[bool]) -> list[int]:
        """Rows b of the batch to start: their prompts are read, and `active[b]` is still false."""
        return [b for b in self.admitted if not active[b] and b not in self.unread]
