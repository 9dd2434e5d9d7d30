"""Follows rank 0: a random source or an autotuner whose decisions are rank 0's on every rank."""

from typing import Any

from minitri.parallel.ranks import RankGroup

DECISIONS = ("sample", "verify", "draw", "walk", "choose", "round_seconds")
"""Methods of random sources and autotuners whose results steer a run."""


class Following:
    """Stands for an object on every rank; what it decides is what it decides on rank 0."""

    def __init__(self, own: Any, ranks: RankGroup) -> None:
        self._own, self._ranks = own, ranks

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._own, name)
        if name not in DECISIONS:
            return value

        def decide(*arguments: Any, **named: Any) -> Any:
            decided = self._ranks.agree(lambda: value(*arguments, **named))
            if name == "choose":  # the autotuner's plan, by which it answers other questions
                self._own.plan = decided
            return decided

        return decide
