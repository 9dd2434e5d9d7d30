"""How a model is computed, as far as those who run it must know; what loads a model states it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from minitri.core.model.cache import Cache, Slots
    from minitri.core.settings import SamplingParams

T = TypeVar("T")
Round = Callable[
    ["Cache", list[list[int]], "Tensor", "Sequence[SamplingParams]", int],
    tuple["Tensor", "Tensor"],
]
"""N guesses (B, N) of a draft model and the distributions (B, N, V) that they were sampled from,
after what its cache holds and a block of each row; by uniform numbers (B, N), the filters of each
row, and V. It leaves the lengths of the cache as they are."""


MakeSlots = Callable[[tuple[int, ...], "torch.dtype", "torch.device"], tuple["Slots", "Slots"]]
"""Allocates keys and values of a shape (..., S, D)."""


class Ranks:
    """The processes that compute a model together; here a process that is alone."""

    rank, count = 0, 1

    def sum(self, x: "Tensor") -> "Tensor":
        """The sum of all ranks' tensors, in place of x."""
        return x

    def ask_first(self, ask: Callable[[], T]) -> T:
        """What `ask` returns or raises on rank 0, where alone it is called."""
        return ask()

    def least(self, value: float) -> float:
        """The smallest of all ranks' values."""
        return value

    def check_same(self, what: str, value: object) -> None:
        """Raises `InputError` on all ranks if a value is not the same everywhere."""


@dataclass(frozen=True)
class Execution:
    """What the bits of a model's results depend on, and what its passes need around them."""

    is_row_invariant: bool = False
    """The bits of a row depend on it alone, in any short pass."""
    decoding: Callable[[], AbstractContextManager[None]] = nullcontext
    reading: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around every step, and around every chunk of a prompt."""
    probs: "Callable[[Tensor, SamplingParams], Tensor] | None" = None
    """Does the same as `probs_from_logits`, faster."""
    round: "Round | None" = None
    """Does what `runner.Passes.round` does, in one call."""
    is_narrow: bool = False
    """More tokens in a block cost more than on other CPUs, see `roofline.NARROW_CPU`."""
    make_slots: MakeSlots | None = None
    """Allocates K and V of caches in the layout that the kernels read; None: plain tensors."""
    computed_by: str = ""  # kernels, processor and threads, or the kind of device
    ranks: Ranks = Ranks()  # noqa: RUF009 (without state)
    fingerprint: str = ""
    """Of the files that the weights were read from; empty: of none."""
