"""The ranks: processes that run one model together, a device each, started by torchrun.

Rank 0 decides. All ranks draw the same random numbers and read the same gathered logits, so they
decide alike but for a last bit that devices may round differently, or a clock; `agree` takes rank
0's word for it. So rank 0 runs the algorithm exactly as if it were alone, and the others follow.

A process alone is a `Ranks`, for which all of this is free. Nothing here knows models or devices:
tensors on CUDA go through NCCL, all others through gloo. What the layers of a model send may be
captured in CUDA graphs.
"""

import atexit
import ctypes
import functools
import os
import pickle
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from minitri.errors import InputError, shorten
from minitri.model.execution import Ranks

TIMEOUT = timedelta(minutes=30)
"""For a rank that says nothing: rank 0 may be fetching. One that has ended is noticed at once."""
JOIN_TIMEOUT = timedelta(minutes=2)
"""For ranks that were never started."""
MESSAGE = 512
"""Bytes of the message in which nearly all decisions fit."""
ADVICE = "start all with one command: torchrun --nproc-per-node 2 -m minitri.generate ..."

T = TypeVar("T")


class RankGroup(Ranks):
    """Several ranks, joined by a process group of `torch.distributed`."""

    def __init__(self, group: Any = None) -> None:
        """`group` None is the default one."""
        self._group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.num_bytes_sent = 0
        """By this rank for the layers of models; a replayed CUDA graph is not counted."""

    def sum(self, x: Tensor) -> Tensor:
        """Adds up the tensors of all ranks, in place; everywhere with the same bits."""
        self.num_bytes_sent += 2 * (self.count - 1) * x.nbytes // self.count
        self._call(dist.all_reduce, x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """(..., V) of each rank, one after the other: (..., ranks x V)."""
        self.num_bytes_sent += (self.count - 1) * x.nbytes
        parts = x.new_empty(self.count, *x.shape)
        self._call(dist.all_gather, [*parts.unbind()], x.contiguous())
        return parts.movedim(0, -2).flatten(-2)

    def agree(self, decide: Callable[[], T]) -> T:
        value: Any = None
        error: Exception | None = None
        try:
            value = decide()
        except Exception as failure:
            error = failure
        value, error = self._of_first((value, error))
        if error is not None:
            raise error
        return value

    def ask_first(self, ask: Callable[[], T]) -> T:
        ask_none: Callable[[], Any] = lambda: None  # noqa: E731
        return self.agree(ask if self.rank == 0 else ask_none)

    def least(self, value: float) -> float:
        least = torch.tensor(value, dtype=torch.float64)
        self._call(dist.all_reduce, least, dist.ReduceOp.MIN)
        return float(least)

    def check_same(self, what: str, value: object) -> None:
        if self.least(float(self._of_first(value) == value)) < 1:
            raise InputError(f"the ranks were given different {what}; {ADVICE}")

    def _of_first(self, value: Any) -> Any:
        """Rank 0's object: in one message, or in two if it is large."""
        data = pickle.dumps(value) if self.rank == 0 else b""
        head = (len(data).to_bytes(8, "little") + data)[:MESSAGE].ljust(MESSAGE, b"\0")
        head = self._from_first(head)
        rest = data[MESSAGE - 8 :]
        size = int.from_bytes(head[:8], "little")
        if size > MESSAGE - 8:
            rest = self._from_first(rest or bytes(size - (MESSAGE - 8)))
        return pickle.loads((head[8:] + rest)[:size])

    def _from_first(self, data: bytes) -> bytes:
        """Rank 0's bytes, as many as there are here."""
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._call(dist.broadcast, sent, 0)
        return ctypes.string_at(sent.data_ptr(), len(data))

    def _call(self, collective: Callable[..., Any], *arguments: Any) -> None:
        try:
            collective(*arguments, group=self._group)
        except RuntimeError as error:
            reason = re.sub(r"^\[\S*\] ", "", str(error))  # without a place in gloo's source
            raise InputError(
                f"rank {self.rank} has lost the other ranks ({shorten(reason, 90)}); one of them "
                "has ended or does not answer, start all of them again"
            ) from None


@functools.cache
def join() -> Ranks:
    """The ranks that torchrun's environment names; without it this process is alone.

    A process group that is there already is used, too. Raises `InputError` if the others do not
    come.
    """
    if _number("WORLD_SIZE", 1) == 1:
        return Ranks()
    options: dict[str, Any] = {"backend": "gloo", "timeout": TIMEOUT}
    if torch.cuda.is_available() and dist.is_nccl_available():
        options["backend"] = "cpu:gloo,cuda:nccl"
    if dist.is_initialized():
        return RankGroup(dist.new_group(**options))
    try:
        store, rank, count = store_of_ranks()
        dist.init_process_group(store=store, rank=rank, world_size=count, **options)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"rank {_number('RANK')} of {_number('WORLD_SIZE')} could not join the others "
            f"({shorten(error, 90)}); {ADVICE}"
        ) from None
    atexit.register(dist.destroy_process_group)  # else the threads of gloo abort the process
    return RankGroup()


@functools.cache
def store_of_ranks() -> tuple[Any, int, int]:
    """The key-value store that torchrun keeps for its ranks; rank and number of this process."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, count = next(iter(rendezvous("env://", timeout=JOIN_TIMEOUT)))
    return PrefixStore("minitri", store), rank, count


def first_end(code: int) -> tuple[int, bool]:
    """The exit code of the rank that ends first, and whether it is this one, which says why.

    The others lose it, and then end, too.
    """
    rank = os.environ.get("RANK", "0")
    if not join.cache_info().currsize or join().count == 1:
        return code, rank == "0" or not rank.isdecimal()
    own = f"{code} {rank}"
    try:
        first = store_of_ranks()[0].compare_set("end", "", own).decode()
    except RuntimeError:  # rank 0 kept the store, and has gone
        return code, True
    return int(first.split()[0]), first == own


def local_rank() -> int:
    """The number of this process among those of its machine, by torchrun's environment."""
    return _number("LOCAL_RANK", _number("RANK", 0))


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise InputError(f"{name} is {shorten(repr(text), 60)} in the environment; {ADVICE}")
    return int(text)
