"""The cascade: levels that propose tokens to one another (TriForce, Algorithm 1).

One step of TriForce with gamma1 = 2 and gamma2 = 3. The text so far ends with the token t.

    draft      guesses a b          token by token, with its streaming cache
    retrieval  reads t a b          one pass of the target over its retrieval cache:
                                    accepts a, rejects b, samples the recovered token c
               its block is a c     fewer tokens than gamma2, so there is another round
    draft      guesses d e
    retrieval  reads c d e          accepts both, samples the bonus token f
               its block is a c d e f, at least gamma2 tokens: it is proposed to the target
    target     reads t a c d e f    one pass over the full cache:
                                    accepts a c d, rejects e, samples the recovered token g
    commit     a c d g join the text; the caches keep t a c d, and g is read in the next step

Each level verifies the stage below it, and what it emits follows its own distribution p exactly
(`verification.py`). So its tokens, with the rows of p they were sampled from, are a valid proposal
for the level above, and by induction the text follows the target's distribution. Every method is
this code with more or fewer levels:

    autoregressive                                                    Level(target, full cache)
    naive           Level(draft, streaming cache)                  -> Level(target, full cache)
    retrieval       Level(target, retrieval cache)                 -> Level(target, full cache)
    triforce        Level(draft, ...) -> Level(target, retrieval cache) -> Level(target, full cache)

The draft model is a level without a stage below: it samples token by token, and its tokens stay on
the device until the level above has verified them, so that the host waits once a round.

A *round* is one level's proposal and its verification by the next; a *step* is a round of the
target. A *stage* is whatever proposes: a level, or a drafter without a model.

All levels share one list of tokens per row: the text, and what the retrieval level has emitted in
this step. Between rounds a cache lacks at least the last token of the list, which is its next
input. Whether another round is run is decided before its first token is sampled, and no emitted
token is discarded: one thrown away for what it is would bend the distribution.
"""

import copy
from collections.abc import Collection
from typing import Self

from minitri.core.decoding.level import Emitted, Level, Stage
from minitri.core.decoding.meter import Meter
from minitri.core.decoding.verification import Proposal, Rows
from minitri.core.settings import StepPlan


class Cascade:
    """All stages of a run and the texts they extend; every `step` commits at least one token."""

    def __init__(
        self,
        sequences: Rows,
        meter: Meter,
        target: Level,
        retrieval: Level | None = None,
        drafter: Stage | None = None,
    ) -> None:
        """`sequences` are the texts, extended in place; the tuner of `meter` chooses the plans."""
        self.sequences = sequences
        self.active = [False] * len(sequences)  # until they start
        self.guessing = [True] * len(sequences)  # rows whose requests allow speculation
        self._meter = meter
        self._target = target
        self.stages = [it for it in (drafter, retrieval, target) if it is not None]

    def of_rows(self, rows: slice) -> Self:
        """The cascade of these rows alone, for one step; its texts and stages are the same ones."""
        part = copy.copy(self)
        part.sequences = self.sequences[rows]
        part.active = self.active[rows]
        part.guessing = self.guessing[rows]
        part._target = self._target.of_rows(rows)
        part.stages = [*(it.of_rows(rows) for it in self.stages[:-1]), part._target]
        return part

    def start(self, rows: Collection[int] | None = None) -> list[Emitted]:
        """Samples the first tokens of these rows, or of all, by the target alone."""
        nothing = Proposal.nothing(len(self.sequences))
        starting = [rows is None or b in rows for b in range(len(self.sequences))]
        emitted = self._target.verify(self.sequences, starting, nothing)
        self.active = [on or new for on, new in zip(self.active, starting, strict=True)]
        return emitted

    def catch_up(self) -> None:
        """Lets small caches catch up after `start`, so that the time it takes counts as prefill."""
        self._stack(self._meter.tuner.plan)
        self._meter.settle()

    def step(self) -> list[Emitted]:
        """Extends every active row by the accepted guesses and one token of the target's own."""
        plan = self._meter.tuner.choose()
        with self._meter.commit():
            self._stack(plan)
        guessing = [on and guess for on, guess in zip(self.active, self.guessing, strict=True)]
        emitted = self._target.round(self.sequences, self.active, guessing)
        self._meter.stats.steps_per_plan[str(plan)] += 1
        return emitted

    def _stack(self, plan: StepPlan) -> None:
        """Puts the stages of a plan on top of one another; lets them catch up with the text."""
        below: Stage | None = None
        gammas = {"draft": plan.gamma1, "retrieval": plan.gamma2, "target": 1}
        for stage in self.stages:
            if gamma := gammas[stage.stats.name]:
                stage.gamma = gamma
                stage.below = below
                stage.prepare(self.sequences, self.active)
                below = stage

    def retire(self, b: int) -> None:
        """Ends row b. Its caches are emptied, so that it costs no attention any more."""
        self.active[b] = False
        self._meter.settle()
        for stage in self.stages:
            stage.reset(b)
