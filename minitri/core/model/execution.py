"""The properties of a loaded model that a run depends on: ranks, kernels, exactness."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from minitri.core.model.cache import Cache, Slots
    from minitri.core.settings import SamplingParams

Answer = TypeVar("Answer")
Round = Callable[
    ["Cache", list[list[int]], "Tensor", "Sequence[SamplingParams]", int], tuple["Tensor", "Tensor"]
]
"""One round of a draft model: from its cache, a block and the settings of each row, uniform numbers
(B, N) and V, N guesses (B, N) and their distributions (B, N, V). It advances no cache."""

# Allocates keys and values of a shape (..., S, D).
MakeSlots = Callable[[tuple[int, ...], "torch.dtype", "torch.device"], tuple["Slots", "Slots"]]


class Ranks:
    """The processes that compute a model together; this class is a single process."""

    rank = 0
    count = 1

    def sum(self, x: "Tensor") -> "Tensor":
        """The sum of all ranks' tensors, in place of x."""
        return x

    def ask_first(self, ask: Callable[[], Answer]) -> Answer:
        """The result or exception of `ask`, which is called on rank 0 alone."""
        return ask()

    def least(self, value: float) -> float:
        """The smallest of all ranks' values."""
        return value

    def check_same(self, what: str, value: object) -> None:
        """Raises `InputError` on all ranks if a value is not the same everywhere."""


@dataclass(frozen=True)
class Execution:
    """How a model is computed; decided when it is loaded."""

    is_row_invariant: bool = False  # bits of a row in a short pass do not depend on other rows
    decoding: Callable[[], AbstractContextManager[None]] = nullcontext  # around every step
    reading: Callable[[], AbstractContextManager[None]] = nullcontext  # around a prompt's chunks
    probs: "Callable[[Tensor, SamplingParams], Tensor] | None" = None  # replaces probs_from_logits
    round: "Round | None" = None  # all passes of a draft model's round in one call
    is_narrow: bool = False  # see `roofline.NARROW_CPU`
    make_slots: MakeSlots | None = None  # in the layout that kernels read; None: plain tensors
    computed_by: str = ""  # kernels, processor and threads, or the kind of device
    ranks: Ranks = Ranks()  # noqa: RUF009 (without state)
    fingerprint: str = ""  # a digest of the files of the weights, if there are any
