"""The logger of all of minitri, which programs show on standard error."""

import logging
import select
from contextlib import suppress
from typing import TextIO

log = logging.getLogger("minitri")


class LossyHandler(logging.StreamHandler[TextIO]):
    """Writes lines of the log to standard error, unless who reads them has no room: nobody waits
    for that. The next line counts those that are lost."""

    _num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        has_room = [self.stream]
        with suppress(ValueError):  # a stream in memory has no number
            _, has_room, _ = select.select([], has_room, [], 0)
        if not has_room:
            self._num_lost += 1
            return
        if self._num_lost:
            record.msg = f"{record.msg} (after {self._num_lost} lines that are lost)"
            self._num_lost = 0
        super().emit(record)
