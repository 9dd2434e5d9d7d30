"""Execution: how a loaded model is computed, set by `minitri/devices`; the core reads it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from minitri.core.decoding.verification import Rule
    from minitri.core.model.cache import Slots
    from minitri.core.settings import SamplingParams

Answer = TypeVar("Answer")
# A function that allocates empty keys and values of shape (..., S, D).
MakeSlots = Callable[[tuple[int, ...], "torch.dtype", "torch.device"], tuple["Slots", "Slots"]]


class Ranks:
    """The processes that compute one model together; this base class stands for one alone."""

    rank = 0
    count = 1

    def sum(self, x: "Tensor") -> "Tensor":
        """Replaces x by the sum of all ranks' tensors, and returns it."""
        return x

    def ask_first(self, ask: Callable[[], Answer]) -> Answer:
        """Calls `ask` on rank 0 alone; all ranks return its result or raise its exception."""
        return ask()

    def least(self, value: float) -> float:
        """The smallest of the values that all ranks give."""
        return value

    def check_same(self, what: str, value: object) -> None:
        """Raises `InputError`, about `what`, on all ranks if they give different values."""


@dataclass(frozen=True)
class Execution:
    """How a model is computed. `devices/` sets it (CPU: `use_kernels`); default: plain PyTorch."""

    is_row_invariant: bool = False  # bits of a row in a short pass do not depend on other rows
    decoding: Callable[[], AbstractContextManager[None]] = nullcontext  # around a decoding step
    reading: Callable[[], AbstractContextManager[None]] = nullcontext  # around a prompt chunk
    probs: "Callable[[Tensor, SamplingParams], Tensor] | None" = None  # replaces probs_from_logits
    rules: "Mapping[Rule, Rule]" = field(default_factory=dict)  # faster verification, by rule
    rounds: Callable[..., Any] = lambda _: None  # what `Passes` of a model compute, in one call
    is_narrow: bool = False  # a CPU without AVX-512, see `roofline.NARROW_CPU`
    make_slots: MakeSlots | None = None  # makes empty K and V for kernels; None: plain tensors
    computed_by: str = ""  # describes kernels, processor and threads, or the device
    ranks: Ranks = Ranks()  # noqa: RUF009 (without state)
    identify: Callable[[], str] = str  # digests the files of the weights; "" if there are none
