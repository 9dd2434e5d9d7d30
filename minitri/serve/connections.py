"""Connections that do not pile up: one whose client makes no progress is closed."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 30
"""For the headers of the first request, and for what was sent to be read."""


class Connection(H11Protocol):
    """uvicorn limits only the pause between two requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Unlike uvicorn's it lets a limit stand until all headers are there."""
        self.conn.receive_data(data)
        self.handle_events()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.cancel()
