"""Metrics of a server for Prometheus: texts, tokens, and the seconds that clients wait for them.

The library keeps them for the whole process, and adds its memory and processor time."""

import time

from prometheus_client import Counter, Gauge, Histogram

from minitri import End, Event, Token

TEXTS = Gauge("minitri_texts", "Texts that run or wait")
TOKENS = Counter("minitri_tokens", "Tokens of ended texts", ["kind"])
SECONDS = Histogram("minitri_seconds", "Until a text's first token, or its next", ["of"])


def note(event: Event, started: float, latest: dict[int, float]) -> None:
    """Counts an event of a call that began at `started`. Reads and updates `latest`, the time of
    the last token of each text, by row. Times are of `time.monotonic`."""
    if isinstance(event, Token):
        now = time.monotonic()
        seconds = SECONDS.labels("next" if event.row in latest else "first")
        seconds.observe(now - latest.get(event.row, started))
        latest[event.row] = now
    elif isinstance(event, End):
        for kind in ("prompt", "cached", "generated"):
            TOKENS.labels(kind).inc(getattr(event.row_stats, f"num_{kind}_tokens"))
