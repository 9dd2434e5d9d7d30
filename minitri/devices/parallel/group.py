"""The group of ranks: processes that run one model together, a device each, started by torchrun.

All ranks draw the same random numbers and read the same gathered logits, so they decide alike; rank
0 sends facts that only one can know, such as a prompt. Tensors on CUDA go through NCCL.
"""

import atexit
import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from minitri.core.errors import InputError, explain
from minitri.core.model.execution import Answer, Ranks

TIMEOUT = timedelta(minutes=30)  # of a collective: rank 0 may be fetching weights
JOIN_TIMEOUT = timedelta(minutes=2)  # for all ranks to start
ADVICE = "start all with one command: torchrun --nproc-per-node 2 -m minitri.generate ..."


@dataclass(eq=False)
class RankGroup(Ranks):
    """Several ranks, joined by the process group of `torch.distributed`."""

    store: Any  # key-value store of all ranks, kept by rank 0 or torchrun
    rank: int
    count: int

    def sum(self, x: Tensor) -> Tensor:
        self._call(dist.all_reduce, x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Concatenates tensors (..., V) of all ranks to (..., ranks x V)."""
        parts = x.new_empty(self.count, *x.shape)
        self._call(dist.all_gather, [*parts.unbind()], x.contiguous())
        return parts.movedim(0, -2).flatten(-2)

    def ask_first(self, ask: Callable[[], Answer]) -> Answer:
        sent: list[Any] = [None, None]  # result and exception of `ask`
        try:
            if self.rank == 0:
                sent[0] = ask()
        except Exception as error:
            sent[1] = error
        self._call(dist.broadcast_object_list, sent, 0)
        if sent[1] is not None:
            raise sent[1]
        return sent[0]

    def least(self, value: float) -> float:
        least = torch.tensor(value, dtype=torch.float64)
        self._call(dist.all_reduce, least, dist.ReduceOp.MIN)
        return float(least)

    def check_same(self, what: str, value: object) -> None:
        if not self.least(self.ask_first(lambda: value) == value):
            raise InputError(f"the ranks were given different {what}; {ADVICE}")

    def _call(self, collective: Callable[..., Any], *arguments: Any) -> None:
        with explain(f"rank {self.rank} has lost the other ranks", "start all of them again"):
            collective(*arguments)


@functools.cache
def join_group() -> RankGroup:
    """Joins the processes that torchrun started, as its environment says. Raises `InputError`."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with explain(f"rank {os.environ.get('RANK')} could not join the others", ADVICE):
        store, rank, count = next(iter(rendezvous("env://", timeout=JOIN_TIMEOUT)))
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=TIMEOUT)
    atexit.register(leave)  # else the threads of gloo abort the process
    return RankGroup(store, rank, count)


def leave() -> None:
    """Ends the group of ranks; resets all CUDA graphs first, as NCCL would wait for them."""
    for thing in gc.get_objects():
        if type(thing) is torch.cuda.CUDAGraph:
            thing.reset()
    dist.destroy_process_group()


def first_end(code: int) -> tuple[int, bool]:
    """Takes this rank's exit code; returns that of the first rank to end, and whether this rank is
    the one to print the reason."""
    rank = os.environ.get("RANK", "0")
    if not dist.is_initialized():
        return code, rank == "0" or not rank.isdecimal()
    own = f"{code} {rank}"
    try:
        first = join_group().store.compare_set("end", "", own).decode()
    except RuntimeError:  # rank 0 kept the store, and has gone
        return code, True
    return int(first.split()[0]), first == own
