"""Log lines of a server, which never wait for a reader of standard error."""

import logging
import select
from contextlib import suppress
from typing import TextIO

PIECE = 1000  # characters, of at most 4 bytes: a pipe with room takes 4096 bytes at once


class LossyHandler(logging.StreamHandler[TextIO]):
    """Writes log lines to standard error, but drops those for which its pipe has no room.
    So nobody waits. The next line says how many were lost, in whole or in part."""

    _num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._num_lost:
            record.msg = f"{record.msg} (after {self._num_lost} lines that are lost)"
        try:
            text = self.format(record) + self.terminator
            for start in range(0, len(text), PIECE):
                has_room = [self.stream]
                with suppress(ValueError):  # a stream in memory has no number
                    _, has_room, _ = select.select([], has_room, [], 0)
                if not has_room:
                    self._num_lost += 1
                    return
                with suppress(OSError):  # a pipe that is closed
                    self.stream.write(text[start : start + PIECE])
                    self.flush()
            self._num_lost = 0
        except Exception:  # as other handlers do
            self.handleError(record)
