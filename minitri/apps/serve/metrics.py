"""Metrics of a server for Prometheus: texts, tokens, and the seconds that clients wait for them."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from minitri import End, Event, Token

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = ("num_prompt_tokens", "num_cached_tokens", "num_generated_tokens")
"""Fields of `RowStats` that are added up."""


class Metrics:
    """Counts of all calls that a server has answered."""

    def __init__(self, num_open: Callable[[], int]) -> None:
        """Makes counts that are 0; `num_open` says how many texts run or wait now."""
        known = self._known = CollectorRegistry()
        gauge = Gauge("minitri_texts", "Texts that run or wait", registry=known)
        gauge.set_function(num_open)
        tokens = Counter("minitri_tokens", "Tokens of ended texts", ["kind"], registry=known)
        self._tokens = {name: tokens.labels(name) for name in TOKENS}
        seconds = Histogram(
            "minitri_seconds",
            "Until the first token, or the next",
            ["of"],
            registry=known,
            buckets=SECONDS,
        )
        self._first, self._next = map(seconds.labels, ("first", "next"))

    def note(self, times: dict[int, float], index: int, event: Event) -> None:
        """Counts an event of text `index` of a call. In `times` is when the call began, at -1, and
        when the latest token of each text came, which this updates."""
        if isinstance(event, Token):
            now = time.monotonic()
            seconds = self._next if index in times else self._first
            seconds.observe(now - times.get(index, times[-1]))
            times[index] = now
        elif isinstance(event, End):
            for name, count in self._tokens.items():
                count.inc(getattr(event.row_stats, name))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._known)
