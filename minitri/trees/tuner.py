"""The autotuner where guesses may be trees: how likely the r-th child of a node is accepted, which
tree that makes the best one, and how fast it is expected to be.

Rates and shapes depend on counts of the past only, and change between steps, so the text follows
the target's distribution whatever is chosen.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from minitri.decoding.autotuner import (
    FIRST_RATES,
    MEMORY,
    Autotuner,
    expected_block,
    expected_tokens,
)
from minitri.settings import StepPlan, parse_tree
from minitri.trees.shape import TreeShape, sequences, sequoia

MAX_CHILDREN = 8
"""Most children that a node of a Sequoia tree has."""
FIRST_RATE = 0.3
"""Share of the tests of a younger sibling that are passed, before any was made."""
FIRST_TESTED = 5.0
"""Tests that this expectation weighs as much as."""
RESHAPE = 16
"""Steps after which the shapes are made anew."""


class TreeTuner(Autotuner):
    """An autotuner that knows trees as well as chains."""

    def __init__(
        self,
        plans: list[StepPlan],
        prior_seconds: Callable[[str, float], float],
        *,
        use_clock: bool,
    ) -> None:
        super().__init__(plans, prior_seconds, use_clock=use_clock)
        # Tests of the second, third, ... child of a node, and how many passed; by who drew them.
        first = (FIRST_TESTED, FIRST_TESTED * FIRST_RATE)
        self._younger = {stage: [first] * (MAX_CHILDREN - 1) for stage in self._guesses}
        self._shapes: dict[StepPlan, TreeShape] = {}
        self._num_steps = 0
        self._keeps_shapes = False

    def choose(self) -> StepPlan:
        if self._num_steps % RESHAPE == 0 and not self._keeps_shapes:
            self._shapes.clear()
        self._num_steps += 1
        return super().choose()

    def keep_shapes(self) -> None:
        """From now on trees have the shapes of the first expectations: a text that depends on them
        must not depend on what became of the guesses for other rows."""
        if not self._keeps_shapes:
            self._keeps_shapes = True
            self._shapes.clear()

    def shape(self, plan: StepPlan) -> TreeShape:
        """The tree that a plan asks for: the best one of its size, or independent sequences."""
        if plan not in self._shapes:
            width, depth = parse_tree(plan.tree)
            stage = grower(plan)
            first = falling_rates(FIRST_RATES[stage], [FIRST_RATE] * (MAX_CHILDREN - 1))
            rates = first if self._keeps_shapes else self.rates(stage)
            max_depth = plan.gamma1 or plan.gamma2
            tree = sequences(width, depth) if depth else sequoia(rates, width, max_depth)
            self._shapes[plan] = tree
        return self._shapes[plan]

    def note_path(self, stage: str, ranks: Sequence[int], num_rejected: int) -> None:
        """Learns what became of a row's tree that `stage` has grown: the ranks of the accepted
        children, the eldest 0, and how many siblings were rejected after them."""
        tests = [*ranks, *([num_rejected] if num_rejected else [])]
        self.note_acceptance(stage, max(len(tests), 1), sum(rank == 0 for rank in ranks))
        younger = self._younger[stage]
        for r in range(1, MAX_CHILDREN):
            tested, passed = younger[r - 1]
            num_tested = sum(rank >= r for rank in ranks) + (num_rejected > r)
            num_passed = sum(rank == r for rank in ranks)
            if num_tested:
                younger[r - 1] = MEMORY * tested + num_tested, MEMORY * passed + num_passed

    def tokens_per_second(self, plan: StepPlan) -> float:
        if not plan.tree:
            return super().tokens_per_second(plan)
        shape = self.shape(plan)
        stage = grower(plan)
        known = list(accumulate(shape.sizes))[:-1]  # nodes when each depth is read, and the root
        seconds = sum(self._cost(stage, max(num_nodes - 2, 0)) for num_nodes in known)
        if stage == "draft" and plan.uses_retrieval:
            per_round = shape.expected_tokens(self.rates(stage))
            length, num_rounds = expected_block(per_round, plan)
            seconds = num_rounds * (seconds + self._cost("retrieval", len(shape) - 1))
            tokens = expected_tokens(self._rate("retrieval"), length)
            return tokens / (seconds + self._cost("target", length))
        tokens = shape.expected_tokens(self.rates(stage))
        return tokens / (seconds + self._cost("target", len(shape) - 1))

    def rates(self, stage: str) -> list[float]:
        """How often the r-th child of a node is accepted; never rising with r."""
        younger = [passed / tested for tested, passed in self._younger[stage]]
        return falling_rates(self._rate(stage), younger)


def falling_rates(first: float, younger: Sequence[float]) -> list[float]:
    """How often the r-th child of a node is accepted, by the rates of those that are tested."""
    rates = list[float]()
    left = 1.0
    for rate in (first, *younger):
        rates.append(min(left * rate, *rates[-1:], 1.0))
        left *= 1 - rate
    return rates


def grower(plan: StepPlan) -> str:
    """The stage that grows a plan's trees: the lowest one."""
    return "draft" if plan.uses_drafter else "retrieval"
