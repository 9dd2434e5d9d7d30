"""Online autotuner: chooses for every step the plan with the highest predicted tokens per second.

A prediction needs two numbers of each stage: the seconds of a round (bytes over bandwidth, times
one measured factor) and the acceptance rate of its guesses. A choice depends on counts and times of
the past, never on tokens to come, so the text follows the target's distribution.
"""

import math
from collections.abc import Callable

from minitri.core.settings import StepPlan, num_nodes

# Measured in tools/RESULTS.md: sections "Ablation of the autotuner", "... what auto gains" and
# "... the build of the retrieval cache, and what choosing costs".
FIRST_RATES = {"draft": 0.5, "retrieval": 0.95}  # assumed before a guess was tested
FIRST_TESTED = 15.0  # weight of this assumption, in tested guesses
MEMORY = 0.97  # factor by which older tested guesses weigh less, for each verdict about a row
SMOOTHING = 0.2  # weight of the latest round in the moving average of a stage's cost
HYSTERESIS = 1.02  # a plan replaces the current one if it is predicted to be faster by this factor
EXPLORATION = 1.003  # a plan's bonus factor for each step that a stage of it idles after PATIENCE
WINDOW = 64  # most tokens that a drafter reads to catch up: sinks and `runner.MOST_RECENT`
BUILD = 5.0  # passes of the target that take as long as the first build of the retrieval cache
PATIENCE = 32  # steps without a stage before it gets a bonus
PAUSE = 8  # steps without guesses from one comparison of all plans to the next


class Autotuner:
    """Chooses the plan of every step from the costs and acceptance rates reported to it."""

    def __init__(
        self,
        plans: list[StepPlan],
        predict_seconds: Callable[[str, float], float],
        *,
        use_clock: bool,
    ) -> None:
        """Makes a tuner; `predict_seconds(stage, num_guesses)` predicts the seconds of a round.
        With `use_clock` measured times count, and `plans[0]` is used until the target is timed."""
        self.plan = plans[0]
        self._plans = plans
        self.predict_seconds = predict_seconds
        self._use_clock = use_clock
        self._factors: dict[str, float] = {}  # measured / predicted seconds, by stage
        self._timed: set[tuple[str, int]] = set()  # stage and number of guesses of past rounds
        # Tested and accepted guesses by stage; older ones weigh less.
        self._guesses = {s: (FIRST_TESTED, FIRST_TESTED * rate) for s, rate in FIRST_RATES.items()}
        self.wants_retrieval = all("retrieval" in plan.proposers for plan in plans)
        """Whether to build the retrieval cache; if not, plans that use it also pay for that."""
        # Steps since a stage was used, minus those that must pass before it gets a bonus.
        self._num_unused = dict.fromkeys(FIRST_RATES, -PATIENCE)
        self._num_unread = WINDOW  # tokens of a row that the drafter reads before its next guess
        self._num_choices = 0
        self.num_left = math.inf  # tokens that a row may still get, on average

    def choose(self) -> StepPlan:
        """The plan of the next step, by predicted speed. Before the first one that needs the
        retrieval cache, if that is not built, comes `plans[0]`, whose step builds it."""
        if not self._use_clock or "target" in self._factors:
            turn = self._num_choices % PAUSE
            if self.plan.proposers or not turn:
                unread_seconds = self._num_unread and self._cost("draft", self._num_unread)
                build_seconds = 0 if self.wants_retrieval else BUILD * self._cost("target", 0)
                setup = {"draft": unread_seconds, "retrieval": build_seconds}
                # Comparing all takes 0.5 ms of Python, so every second step leaves it out.
                some = [self._plans[0], self.plan] if turn % 2 else self._plans
                speeds = {plan: self._value(plan, setup) for plan in some}
                best = max(speeds, key=speeds.__getitem__)
                if speeds[best] > HYSTERESIS * speeds[self.plan]:
                    self.plan = best
            self._num_choices += 1
        if self.plan.gamma2 and not self.wants_retrieval:
            self.wants_retrieval = True
            return self._plans[0]
        used = self.plan.proposers
        self._num_unread = 0 if "draft" in used else min(self._num_unread + 1, WINDOW)
        for stage, n in self._num_unused.items():
            self._num_unused[stage] = -PATIENCE if stage in used else n + 1
        return self.plan

    def note_round(self, stage: str, num_guesses: int, seconds: float) -> None:
        """Records seconds of a stage's round that verified `num_guesses`, or drafted one token."""
        # The first round of each length is ignored: it may have compiled or allocated something.
        if (stage, num_guesses) in self._timed and self._use_clock:
            measured = seconds / self.predict_seconds(stage, num_guesses)
            known = self._factors.get(stage, measured)
            # Outliers are capped: a stage that looks slow would not be timed again.
            self._factors[stage] = known + SMOOTHING * (min(measured, 2 * known) - known)
        self._timed.add((stage, num_guesses))

    def note_acceptance(self, proposer: str, num_tested: int, num_accepted: int) -> None:
        """Records how many of a row's guesses by stage `proposer` were tested, and accepted."""
        tested, accepted = self._guesses[proposer]
        self._guesses[proposer] = (MEMORY * tested + num_tested, MEMORY * accepted + num_accepted)

    def tokens_per_second(self, plan: StepPlan) -> float:
        length = float(plan.gamma1)
        tree = num_nodes(plan.tree)
        num_guesses = tree or length
        # Each pass of the drafter reads the nodes so far, half of them on average.
        seconds = plan.gamma1 * self._cost("draft", tree / 2)
        if plan.gamma2:
            per_round = expected_tokens(self._rate("draft"), plan.gamma1)
            length = plan.gamma2 + (per_round - 1) / 2  # the last round overshoots
            seconds = length / per_round * (seconds + self._cost("retrieval", num_guesses))
            num_guesses = length
        rate = self._rate("retrieval" if plan.gamma2 else "draft")
        return expected_tokens(rate, length) / (seconds + self._cost("target", num_guesses))

    def _value(self, plan: StepPlan, setup: dict[str, float]) -> float:
        """Predicted tokens/s, with a bonus for idle stages; `setup`: seconds to make each ready."""
        num_steps = max((0, *(self._num_unused[stage] for stage in plan.proposers)))
        speed = self.tokens_per_second(plan) * EXPLORATION ** min(num_steps, self.num_left)
        seconds = sum(setup[stage] for stage in plan.proposers)
        return speed / (1 + seconds * speed / self.num_left)

    def _rate(self, proposer: str) -> float:
        tested, accepted = self._guesses[proposer]
        return accepted / tested

    def _cost(self, stage: str, num_guesses: float) -> float:
        """Predicted seconds of a stage's round, scaled by measured times of it or of the target."""
        factor = self._factors.get(stage, self._factors.get("target", 1.0))
        return factor * self.predict_seconds(stage, round(num_guesses))


def expected_tokens(rate: float, num_guesses: float) -> float:
    """Expected tokens of a round: guesses accepted at `rate`, and one token of the verifier."""
    return num_guesses + 1 if rate >= 1 else (1 - rate ** (num_guesses + 1)) / (1 - rate)
