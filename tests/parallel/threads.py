"""Ranks that are threads of one process: for tests that must see its code, such as mutants'."""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from minitri.errors import InputError
from minitri.parallel.ranks import RankGroup

SECONDS = 10
"""After which a rank whose others do not come is alone."""


class ThreadRanks(RankGroup):
    """Rank `rank` of several; what is sent goes through a list that all of them hold."""

    def __init__(self, rank: int, sent: list, barrier: threading.Barrier) -> None:
        self.rank, self.count = rank, len(sent)
        self._sent, self._barrier = sent, barrier

    def _call(self, collective: Callable[..., Any], *arguments: Any) -> None:
        *outputs, own = arguments[:2] if collective is dist.all_gather else arguments[:1]
        self._sent[self.rank] = collective, copy.deepcopy(own)
        self._wait()
        whats, given = zip(*self._sent, strict=True)
        self._wait()
        shapes = {getattr(it, "shape", None) for it in given}
        if len({*whats}) > 1 or len(shapes) > 1:
            self._barrier.abort()
            raise InputError(f"rank {self.rank} does something else than the others")
        if collective is dist.all_gather:
            for output, tensor in zip(outputs[0], given, strict=True):
                output.copy_(tensor)
        elif collective is dist.broadcast_object_list:
            own[:] = given[0]
        else:
            stack = torch.stack(given)
            own.copy_(stack.amin(0) if arguments[1:] else stack.sum(0))

    def _wait(self) -> None:
        try:
            self._barrier.wait(SECONDS)
        except threading.BrokenBarrierError:
            raise InputError(f"rank {self.rank} has lost the others") from None


def on_ranks(count: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What every rank makes of its work."""
    sent, barrier = [None] * count, threading.Barrier(count)

    def run(rank: int) -> Any:
        with torch.inference_mode():
            return work(ThreadRanks(rank, sent, barrier))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
