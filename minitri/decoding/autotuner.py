"""Which stages take part in the next step, how far they run ahead, and how much the retrieval cache holds: what pays.

A `Plan` is a method with its gammas. `Tuner.choose` predicts the tokens per second of every plan that is allowed, from
what a round of each stage costs and from how many of its guesses were accepted lately, and takes the best; the current
plan keeps its place against small advantages. Now and then it asks the same of the next smaller and the next larger
budget of the retrieval cache, since it knows how bytes and rejections change with it. Autoregressive decoding is one of
the plans, so speculation that does not pay is switched off. No step is spent on measuring alone: what has not been
measured is expected to cost what bytes suggest, next to what has been, and a little less with every step, and guesses
never tried are thought of well until they have been tried. What is known of a stage that is not used grows old: its
guesses are thought of more and more as if never tried, and its rounds expected to cost less, so that it gets another
chance when the text, or the machine, has changed.

Choices depend on counts and times of the past alone, never on which tokens were drawn, so every step's tokens follow
the target's law whatever is chosen. If not even times may matter, because a seed is to give the same text twice, the
costs are nominal ones, computed from bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minitri.model.llama import Llama
import math
from minitri.settings import StepPlan as Plan

FORGETTING = 0.97
"""What is left, after each verdict about a row, of what the verdicts before it said about acceptance."""
SMOOTHING = 0.8
"""Weight of the past in the moving average of a round's time."""
SLOPE = 0.04
"""By how much one more guess makes a round slower, where no two lengths that were measured say it."""


class Recent:
    """What a level did lately: whose guesses it accepted, and what its rounds cost."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self.guesses: dict[str, tuple[float, float]] = {}
        """Per stage that guessed: tested and accepted guesses, older ones counting less."""
        self._seconds: dict[int, float] = {}  # of a round, by the number of guesses in it
        self._num_timed: dict[int, int] = {}
        self._last_timed: dict[int, int] = {}
        self._line: list[tuple[int, float]] = []  # what that comes to, rising

    def note(self, proposer: str | None, *, num_tested: int, num_accepted: int) -> None:
        """Notes a verdict about one row. No guess at all counts as one that was rejected."""
        if proposer is not None:
            tested, accepted = self.guesses.get(proposer, (0.0, 0.0))
            self.guesses[proposer] = (
                FORGETTING * tested + max(num_tested, 1), FORGETTING * accepted + num_accepted
            )  # fmt: skip

    def note_time(self, num_guesses: int, seconds: float) -> None:
        """Notes the time of a round."""
        self.num_rounds += 1
        times = self._num_timed[num_guesses] = self._num_timed.get(num_guesses, 0) + 1
        known = self._seconds.get(num_guesses, seconds)
        smoothed = (
            min(known, seconds) if times <= 3 else SMOOTHING * known + (1 - SMOOTHING) * seconds
        )
        self._seconds[num_guesses] = smoothed
        self._last_timed[num_guesses] = self.num_rounds
        self._fit()

    def scale_seconds(self, factor: float) -> None:
        """Expects rounds to take so many times as long from now on."""
        self._seconds = {
            num_guesses: factor * seconds for num_guesses, seconds in self._seconds.items()
        }
        self._fit()

    def _fit(self) -> None:
        """Fewer guesses never cost more: what says so was measured when the machine was slower, or faster, and what was
        measured later is right."""
        twice = [
            n for n, times in self._num_timed.items() if times > 1
        ]  # the first of a length may have been slow
        fitted: dict[int, float] = {}
        for n in sorted(twice or self._seconds, key=self._last_timed.__getitem__, reverse=True):
            least = max((seconds for other, seconds in fitted.items() if other < n), default=0.0)
            most = min(
                (seconds for other, seconds in fitted.items() if other > n), default=math.inf
            )
            fitted[n] = min(max(self._seconds[n], least), most)
        self._line = sorted(fitted.items())

    def seconds_of_round(self, num_guesses: float) -> float | None:
        """Of a round with so many guesses: on straight lines between those that were measured and beyond the most, by
        the usual slope below the fewest; None before the first."""
        if not self._line:
            return None
        (fewest, seconds), *more = self._line
        if not more or num_guesses < fewest:
            return seconds * max(0.5, 1 + SLOPE * (num_guesses - fewest))
        after = max(
            next((i for i, (n, _) in enumerate(self._line) if n >= num_guesses), len(more)), 1
        )
        (left, low), (right, high) = self._line[after - 1 : after + 1]
        return low + (high - low) / (right - left) * (num_guesses - left)


class _S:
    def __init__(self, name):
        self.name, self.recent = name, Recent()


OPTIMISM = {"draft": 0.55, "retrieval": 0.9}
"""Acceptance rates expected of a stage's guesses before there are any; with another budget, what is predicted."""
EVIDENCE = 5.0
"""Tested guesses that this expectation weighs as much as."""
FADING = 0.995
"""What is left, after each step, of the evidence about a pair of stages that the step did not use."""
HYSTERESIS = 1.02
"""A plan must be predicted to be so many times as fast as the current one to replace it."""
NUM_WARM_UP = 2
"""First rounds of a stage, which may be slow for reasons of their own, so its cost is not taken to be higher than
expected; and first steps, whose plans have no right to stay."""
PATIENCE = 0.97
"""With every step, a stage that has hardly been run is expected to cost so much less, lest it never be."""
AGEING = 0.998
"""With every step, a stage that has been run, but is not used now, is expected to cost so much less."""
BUDGET_POWER = -0.6
"""Guesses of the retrieval level are rejected in proportion to its budget to the power of this (see README)."""
BUDGET_PERIOD = 16
"""Steps after which other budgets are considered."""
BUDGET_EVIDENCE = 24.0
"""Guesses of the retrieval level that must have been tested for that, lately and with the current budget."""
BUDGET_HYSTERESIS = 1.03
"""Another budget must be predicted to be so many times as fast: the cache has to be chosen anew."""

AUTOREGRESSIVE = Plan("autoregressive")

Nominal = Callable[[str, float, int], float]
"""Seconds of a round of a stage that verifies so many guesses, with so many tokens in the retrieval caches, as bytes
suggest."""


class Tuner:
    """Chooses among plans and budgets."""

    def __init__(
        self,
        stages: list[_S],
        plans: list[Plan],
        nominal: Nominal,
        *,
        timed: bool,
        budgets: Sequence[int] = (0,),
        budget: int = 0,
    ) -> None:
        """With `timed` nominal costs only say what to expect of a round that has not been measured, in proportion to
        those that have. `budgets` are those to choose from, from the smallest up, `budget` is that of the beginning."""
        assert plans
        assert budget in budgets
        self._stages = {stage.name: stage for stage in stages}
        self._plans = plans
        self._nominal = nominal
        self._timed = timed
        self.plan = plans[0]
        self.budget = budget
        """Tokens that the retrieval caches of all rows should hold together."""
        self._budgets = list(budgets)
        self._expected = dict(OPTIMISM)
        self._num_chosen = 0
        self._num_unused = dict.fromkeys(self._stages, 0)  # steps since the last with this stage

    def choose(self) -> Plan:
        """The plan of the next step; it may change the budget, too."""
        if len(self._budgets) > 1 and self._num_chosen % BUDGET_PERIOD == BUDGET_PERIOD - 1:
            self._choose_budget()
        speeds = {plan: self.tokens_per_second(plan) for plan in self._plans}
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] > HYSTERESIS * speeds[self.plan] or self._num_chosen < NUM_WARM_UP:
            self.plan = best
        self._num_chosen += 1
        self._fade()
        return self.plan

    def tokens_per_second(
        self, plan: Plan, rate: float | None = None, *, budget: int | None = None
    ) -> float:
        """What a plan is expected to do; `rate` replaces the acceptance rate of the last level's guesses."""
        if plan.method == "autoregressive":
            return 1 / self._cost("target", 0)
        budget = self.budget if budget is None else budget
        proposer = "draft" if plan.method == "naive" else "retrieval"
        length, seconds = self._block(plan, budget)
        if rate is None:
            rate = self.rate("target", proposer)
            rate = self._rate_with(budget, rate) if proposer == "retrieval" else rate
        return expected_tokens(rate, length) / (seconds + self._cost("target", length))

    def break_even(self) -> float | None:
        """The acceptance rate of the last level at which the current plan is as fast as the target alone; 1 if it never
        is; None if there is no choice."""
        if self.plan.method == "autoregressive" or AUTOREGRESSIVE not in self._plans:
            return None
        alone = self.tokens_per_second(AUTOREGRESSIVE)
        low, high = 0.0, 1.0
        for _ in range(10):
            middle = (low + high) / 2
            low, high = (
                (low, middle)
                if self.tokens_per_second(self.plan, middle) > alone
                else (middle, high)
            )
        return high

    def rate(self, verifier: str, proposer: str) -> float:
        """The acceptance rate to be expected, from recent guesses and, while they are few, from those that the other
        verifier of this proposer tested, which follows nearly the same law, and from optimism."""
        rate, evidence = self._expected[proposer], EVIDENCE
        for name in sorted(
            self._stages, key=lambda name: name == verifier
        ):  # the verifier itself has the last word
            tested, accepted = self._stages[name].recent.guesses.get(proposer, (0.0, 0.0))
            if tested:
                rate = (accepted + evidence * rate) / (tested + evidence)
        return rate

    def _block(self, plan: Plan, budget: int) -> tuple[float, float]:
        """Expected guesses that reach the last level in a step, and the seconds that making them takes."""
        if plan.method == "naive":
            return plan.gamma1, self._draft_seconds(plan.gamma1)
        if plan.method == "retrieval":
            return plan.gamma2, plan.gamma2 * self._cost("retrieval", 0, budget)
        length, num_rounds = expected_block(self.rate("retrieval", "draft"), plan)
        round_seconds = self._draft_seconds(plan.gamma1) + self._cost(
            "retrieval", plan.gamma1, budget
        )
        return length, num_rounds * round_seconds

    def _draft_seconds(self, gamma1: int) -> float:
        return gamma1 * self._cost("draft", 0)

    def _cost(self, stage: str, num_guesses: float, budget: int | None = None) -> float:
        budget = self.budget if budget is None else budget
        nominal = self._nominal(stage, num_guesses, budget)
        if not self._timed:
            return nominal
        recent = self._stages[stage].recent
        measured = recent.seconds_of_round(num_guesses)
        if measured is not None and budget != self.budget:
            measured *= nominal / self._nominal(stage, num_guesses, self.budget)
        if measured is not None and recent.num_rounds >= NUM_WARM_UP:
            return measured * AGEING ** self._num_unused[stage]
        target = self._stages["target"].recent.seconds_of_round(0)
        expected = nominal * (target / self._nominal("target", 0, budget) if target else 1)
        patient = expected * PATIENCE**self._num_chosen
        return patient if measured is None else min(measured, patient)

    def _choose_budget(self) -> None:
        """Moves to the next smaller or larger budget if that is predicted to pay."""
        tested, _ = self._stages["target"].recent.guesses.get("retrieval", (0.0, 0.0))
        if tested < BUDGET_EVIDENCE:
            return
        here = self._budgets.index(self.budget)
        near = self._budgets[max(here - 1, 0) : here + 2]
        speeds = {
            budget: max(self.tokens_per_second(plan, budget=budget) for plan in self._plans)
            for budget in near
        }
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] > BUDGET_HYSTERESIS * speeds[self.budget]:
            factor = self._nominal("retrieval", 0, best) / self._nominal(
                "retrieval", 0, self.budget
            )
            self._stages["retrieval"].recent.scale_seconds(factor)
            self._expected["retrieval"] = self._rate_with(best, self.rate("target", "retrieval"))
            del self._stages["target"].recent.guesses[
                "retrieval"
            ]  # which were tested with another budget
            self.budget = best

    def _rate_with(self, budget: int, rate: float) -> float:
        """What an acceptance rate of the retrieval level's guesses becomes with another budget."""
        return (
            rate
            if budget == self.budget
            else max(0.0, 1 - (1 - rate) * (budget / self.budget) ** BUDGET_POWER)
        )

    def _fade(self) -> None:
        used = {"naive": {("target", "draft")}, "retrieval": {("target", "retrieval")}}
        used["triforce"] = {("target", "retrieval"), ("retrieval", "draft")}
        pairs = used.get(self.plan.method, set())
        stages = {"target"}.union(*pairs)
        for name, stage in self._stages.items():
            self._num_unused[name] = 0 if name in stages else self._num_unused[name] + 1
            for proposer, (tested, accepted) in stage.recent.guesses.items():
                if (name, proposer) not in pairs:
                    stage.recent.guesses[proposer] = (tested * FADING, accepted * FADING)


def expected_tokens(rate: float, num_guesses: float) -> float:
    """Tokens per round, the verifier's own included, if guesses are accepted independently at this rate."""
    return num_guesses + 1 if rate >= 1 else (1 - rate ** (num_guesses + 1)) / (1 - rate)


def expected_block(rate: float, plan: Plan) -> tuple[float, float]:
    """Guesses that the retrieval level of triforce collects for the last level, and the rounds that this takes, if it
    accepts the drafter's at this rate."""
    per_round = expected_tokens(rate, plan.gamma1)
    length = plan.gamma2 + (per_round - 1) / 2  # the last round overshoots
    return length, length / per_round


CPU_COSTS = (0.3e-3, 15e9, 6.5e9, 0.04)
CUDA_COSTS = (0.05e-3, 2e12, 2e12, 0.01)
"""Nominal seconds per layer whatever is in it, bytes per second of weights and of KV, and what one more guess adds to a
round."""
LINK = 25e9
"""Nominal bytes per second from host memory to a device."""


def nominal_costs(
    target: Llama, draft: Llama | None, num_tokens: int, hosted_share: float = 0.0
) -> Nominal:
    """The same in every run: from the bytes that must be read. The full cache holds `num_tokens` in all its rows, of
    which a share comes from host memory."""
    on_gpu = target.device.type == "cuda"
    per_layer, weights_bandwidth, kv_bandwidth, slope = CUDA_COSTS if on_gpu else CPU_COSTS

    def alone(model: Llama) -> float:
        return model.config.num_layers * per_layer + model.num_bytes / weights_bandwidth

    slot_bytes = target.config.kv_values_per_token * target.dtype.itemsize
    base = {
        "target": alone(target),
        "retrieval": alone(target),
        "draft": alone(draft) if draft else 0.0,
    }
    base["target"] = max(
        base["target"] + num_tokens * slot_bytes / kv_bandwidth,
        hosted_share * num_tokens * slot_bytes / LINK,
    )

    def seconds(stage: str, num_guesses: float, budget: int) -> float:
        small = budget * slot_bytes / kv_bandwidth if stage == "retrieval" else 0.0
        return (base[stage] + small) * (1 + slope * num_guesses)

    return seconds


class Autotuner(Tuner):
    def __init__(self, plans, prior_seconds, *, use_clock):
        names = ["draft", "retrieval", "target"]
        used = {"target"}
        for plan in plans:
            used |= {"draft"} if plan.gamma1 else set()
            used |= {"retrieval"} if plan.gamma2 else set()
        super().__init__(
            [_S(n) for n in names if n in used],
            plans,
            lambda s, n, b: prior_seconds(s, n),
            timed=use_clock,
        )

    def note_round(self, stage, num_guesses, seconds):
        self._stages[stage].recent.note_time(num_guesses, seconds)

    def note_acceptance(self, verifier, proposer, *, num_tested, num_accepted):
        self._stages[verifier].recent.note(
            proposer, num_tested=num_tested, num_accepted=num_accepted
        )
