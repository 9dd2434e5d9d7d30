"""HTTP connections with time limits: one whose client makes no progress is closed."""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 30  # for the headers of the first request, and for a client to read what was sent
SPARE_FILES = 128  # open files that are not connections


class Connection(H11Protocol):
    """Connection of uvicorn, which by itself limits only the pause between two requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            others: Any = self.connections - {self}
            idle = (each for each in others if not (each.cycle or each.transport.is_closing()))
            next(idle, self).transport.abort()
        self.timeout_keep_alive_task = self.loop.call_later(SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Reads data; unlike uvicorn's, it keeps the time limit until all headers are there."""
        self.conn.receive_data(data)
        self.handle_events()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.cancel()


def most_connections() -> int:
    """Most open connections: the limit of open files, less `SPARE_FILES`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, soft - SPARE_FILES)
