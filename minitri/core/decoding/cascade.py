"""The cascade: stages that propose tokens to one another (TriForce, Algorithm 1).

One step of TriForce with gamma1 = 2 and gamma2 = 3. The committed text ends with the token t.

    draft      guesses a b          token by token, with its streaming cache
    retrieval  reads t a b          one pass of the target over its retrieval cache:
                                    accepts a, rejects b, samples the recovered token c
               its block is a c     fewer tokens than gamma2, so another round follows
    draft      guesses d e
    retrieval  reads c d e          accepts both, samples the bonus token f
               its block is a c d e f, at least gamma2 tokens: it is proposed to the target
    target     reads t a c d e f    one pass over the full cache:
                                    accepts a c d, rejects e, samples the recovered token g
    commit     a c d g join the text; the full cache keeps t a c d; g is read in the next step

Every level verifies the stage below it, and the tokens it emits follow its own distribution p
exactly (`verification.py`). So they are a valid proposal for the level above, and by induction the
text follows the target's distribution. Every method is this code with more or fewer levels:

    autoregressive                                                    Level(target, full cache)
    naive           Level(draft, streaming cache)                  -> Level(target, full cache)
    retrieval       Level(target, retrieval cache)                 -> Level(target, full cache)
    triforce        Level(draft, ...) -> Level(target, retrieval cache) -> Level(target, full cache)

Between rounds a cache lacks at least the last token of its row, which is its next input. Whether
another round runs is decided before its first token is sampled, and no emitted token is withheld:
to drop one because of its value would bias the distribution.
"""

import copy
from collections.abc import Collection

from minitri.core.decoding.level import Level, Stage
from minitri.core.decoding.verification import Emitted, Proposal, Rows
from minitri.core.settings import StepPlan
from minitri.core.stats import Meter


class Cascade:
    """The stages of a run and the texts they extend; `step` is one step of speculative decoding."""

    def __init__(self, sequences: Rows, meter: Meter, target: Level, *below: Stage | None) -> None:
        """Joins the stages: the `target`, and `below` it a drafter and a retrieval level, if any.
        `sequences`, each row's tokens, grow in place; the tuner of `meter` chooses plans."""
        self.sequences = sequences
        self.active = [False] * len(sequences)  # rows that have started and not ended
        self.guessing = [True] * len(sequences)  # rows whose requests allow speculation
        self._meter = meter
        self._target = target
        self.stages = [stage for stage in (*below, target) if stage]

    def of_rows(self, rows: slice) -> "Cascade":
        """A cascade over a slice of the rows, for one step; it shares texts, caches and meter."""
        part = copy.copy(self)
        part.sequences = self.sequences[rows]
        part.active = self.active[rows]
        part.guessing = self.guessing[rows]
        part._target = self._target.of_rows(rows)
        part.stages = [*(stage.of_rows(rows) for stage in self.stages[:-1]), part._target]
        return part

    def start(self, rows: Collection[int]) -> list[Emitted]:
        """Samples the first token of these active rows by the target; one `Emitted` per row."""
        starting = [b in rows for b in range(len(self.sequences))]
        return self._target.verify(self.sequences, starting, Proposal.nothing(len(starting)))

    def catch_up(self) -> None:
        """Prepares the stages of the current plan: their caches read or copy the prompt.
        Called right after `start`, so that the time of this counts as prefill."""
        self._connect(self._meter.tuner.plan)
        self._meter.clock.settle()  # waits for the device

    def step(self) -> list[Emitted]:
        """Extends active rows by accepted guesses and one token of the target; returns these."""
        plan = self._meter.tuner.choose()
        self._connect(plan)
        guessing = [on and guess for on, guess in zip(self.active, self.guessing, strict=True)]
        emitted = self._target.round(self.sequences, self.active, guessing)
        self._meter.stats.steps_per_plan[str(plan)] += 1
        return emitted

    def _connect(self, plan: StepPlan) -> None:
        below: Stage | None = None
        gammas = {"draft": plan.gamma1, "retrieval": plan.gamma2, "target": 1}
        for stage in self.stages:
            if gamma := gammas[stage.name]:  # 0: the plan does not use this stage
                stage.gamma = gamma
                stage.below = below
                stage.prepare(self.sequences, self.active)
                below = stage

    def retire(self, b: int) -> None:
        """Ends row b and empties its caches, so that passes over other rows spend no time on it."""
        self.active[b] = False
        self._meter.clock.settle()
        for stage in self.stages:
            stage.reset(b)
