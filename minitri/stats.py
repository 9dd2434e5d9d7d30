"""What a run did and how long it took: plain numbers, live while the run goes on. Nothing here prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stats:
    """Counts and seconds of one run over a batch of prompts; seconds are those of the engine, not of its caller."""

    num_prompt_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_decoded_tokens: int = 0
    """Generated tokens less the first of each prompt, which comes from the prefill."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    kv_cache_bytes: int = 0

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds of decoding per decoded token of the whole batch; None before the first."""
        return 1e3 * self.decode_seconds / self.num_decoded_tokens if self.num_decoded_tokens else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decoded tokens of the whole batch per second of decoding; None before the first."""
        return self.num_decoded_tokens / self.decode_seconds if self.num_decoded_tokens else None


class PrefillClock:
    """Foretells the rest of a prefill, whose time grows as a n + b n^2: n tokens of matmuls, n^2 / 2 of attention."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._marks: list[tuple[int, float]] = []  # (tokens done, seconds so far)

    def mark(self, num_done: int, seconds: float) -> float:
        """Notes progress; returns the seconds that probably remain."""
        if num_done == self._num_tokens:
            return 0.0
        self._marks.append((num_done, seconds))
        n1, t1 = self._marks[(len(self._marks) - 1) // 2]
        n2, t2 = num_done, seconds
        quadratic = max(0.0, (t2 / n2 - t1 / n1) / (n2 - n1)) if n2 > n1 else 0.0
        linear = t2 / n2 - quadratic * n2
        total = linear * self._num_tokens + quadratic * self._num_tokens**2
        return max(0.0, total - seconds)
