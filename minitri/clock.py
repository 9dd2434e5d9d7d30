"""What the work of a stage takes, on a device that may still be at it when the host goes on."""

import time
from collections.abc import Callable
from typing import Any


class Clock:
    """The host's clock, for a device that has done its work when a call returns."""

    def now(self) -> Any:
        """A mark in time."""
        return time.perf_counter()

    def since(self, start: Any, take: Callable[[float], None]) -> None:
        """Gives `take` the seconds from a mark until now: at once, or when they are known."""
        take(time.perf_counter() - start)

    def settle(self) -> None:
        """Waits until the device has done all that is timed, and gives out the seconds."""
