"""Metrics of a server for Prometheus: texts, tokens, and the seconds that clients wait for them.

They count in the whole process, next to its memory and processor time, which the library adds.
"""

import time

from prometheus_client import Counter, Gauge, Histogram

from minitri import End, Event, Token

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TEXTS = Gauge("minitri_texts", "Texts that run or wait")
TOKENS = Counter("minitri_tokens", "Tokens of ended texts", ["kind"])
SECONDS = Histogram(
    "minitri_seconds", "Until a text's first token, or its next", ["of"], buckets=BUCKETS
)
KINDS = ("num_prompt_tokens", "num_cached_tokens", "num_generated_tokens")
"""Fields of `RowStats` that are added up."""


def note(times: dict[int, float], index: int, event: Event) -> None:
    """Counts an event of text `index` of a call. In `times` is when the call began, at -1, and when
    the latest token of each text came, which this updates."""
    if isinstance(event, Token):
        now = time.monotonic()
        seconds = SECONDS.labels("next" if index in times else "first")
        seconds.observe(now - times.get(index, times[-1]))
        times[index] = now
    elif isinstance(event, End):
        for kind in KINDS:
            TOKENS.labels(kind).inc(getattr(event.row_stats, kind))
