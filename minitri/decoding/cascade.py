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

The draft model is a level without a stage below: it verifies nothing and samples token by token.
Its tokens stay on the device until the level above has verified them, so that the host waits once a
round, for the verdict.

Invariants. All levels share one list of tokens per row: the text, and behind it the guesses in
flight. A cache never holds the last token of a list, which is the next input. Whether another
round is run is decided before its first token is sampled, and no emitted token is discarded: a
token thrown away for what it is would bend the distribution.

Legend: B rows, N proposed tokens, V vocab.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minitri.decoding.autotuner import Autotuner
from minitri.decoding.random_source import RandomSource
from minitri.decoding.verification import NotFiniteError, Proposal, Verdict
from minitri.settings import StepPlan
from minitri.stats import LevelStats, Stats


@dataclass(frozen=True)
class Emitted:
    """The tokens that a round added to a row, and where each of them came from."""

    tokens: list[int]
    origins: list[str]
    """The stage that guessed the token (`draft`, `retrieval`), or `recovered` or `bonus`."""


class Follower(Protocol):
    """Something that follows the texts as they grow: a stage of the cascade, or a runner."""

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """Called before a step that uses it, when all `sequences` are certain."""

    def crop(self, lengths: list[int]) -> None:
        """Drops what it knows of row b behind the first `lengths[b]` tokens: it was rejected."""

    def reset(self, b: int) -> None:
        """Drops all that it knows of row b."""


class Stage(Follower, Protocol):
    """Something that proposes tokens: a `Level`, or a drafter without a model."""

    stats: LevelStats
    gamma: int
    """Tokens to collect for a proposal; the last round may overshoot it."""

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Guesses the next tokens of the active rows; leaves `sequences` as they were."""

    def switch_off(self) -> None:
        """Called where its distributions were not finite: it must guess no more."""


class Runner(Follower, Protocol):
    """A model with a cache, as a level sees it; see `runner.py`."""

    def next_probs(
        self, sequences: list[list[int]], active: list[bool], guesses: Proposal | None = None
    ) -> Tensor:
        """Distributions behind each row's last token and each of the guesses behind it, in order.

        Shape (B, N + 1, V). Reads what the cache has not seen of the active rows; rows that are not
        active get numbers that mean nothing.
        """

    def next_probs_behind(self, tokens_B: Tensor, active: list[bool]) -> Tensor:
        """Reads one more token of each active row, which the host need not know: (B, V)."""

    def commit(self, emitted: list[Emitted], active: list[bool], *, has_guessed: bool) -> None:
        """Called after every step with what became certain. `has_guessed`: whether the guesses
        that were verified came from this runner."""


class Level:
    """One level of the cascade: verifies the stage below it, proposes to the level above."""

    def __init__(
        self,
        runner: Runner,
        source: RandomSource,
        stats: LevelStats,
        tuner: Autotuner,
        on_not_finite: Callable[[], None] | None = None,
    ) -> None:
        """`on_not_finite` makes this level optional: where its distributions are not finite it is
        called, and the level proposes nothing any more."""
        self.runner = runner
        self.stats = stats
        self.below: Stage | None = None  # like gamma, set before every step: see `Cascade`
        self.gamma = 1
        self._source = source
        self._tuner = tuner
        self._on_not_finite = on_not_finite
        self._is_off = False

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Runs rounds until every active row has a block of at least `gamma` tokens."""
        if self.below is None:
            return self._draft(sequences, active)
        starts = [len(sequence) for sequence in sequences]
        probs: list[list[Tensor]] = [[] for _ in sequences]
        origins: list[list[str]] = [[] for _ in sequences]
        unfinished = active
        while any(unfinished):
            emitted, probs_BNV = self.round(sequences, unfinished)
            for b, row in enumerate(emitted):
                probs[b].append(probs_BNV[b, : len(row.tokens)])
                origins[b] += [*row.origins[:-1], self.stats.name] if row.tokens else []
            unfinished = [
                on and len(row) < self.gamma for on, row in zip(active, origins, strict=True)
            ]
        blocks = [sequence[start:] for sequence, start in zip(sequences, starts, strict=True)]
        for sequence, start in zip(sequences, starts, strict=True):
            del sequence[start:]
        rows = [torch.cat(row) for row in probs]
        return Proposal.of(blocks, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), origins)

    def _draft(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Guesses `gamma` tokens of every active row, one behind the other, on the device."""
        B, tokens, probs = len(sequences), list[Tensor](), list[Tensor]()
        if self._is_off:
            return Proposal.nothing(B)
        for i in range(self.gamma):
            started = time.perf_counter()
            if i == 0:
                probs.append(self.runner.next_probs(sequences, active).squeeze(1))
            else:
                probs.append(self.runner.next_probs_behind(tokens[-1], active))
            positions = [len(sequence) + i for sequence in sequences]
            tokens.append(self._source.sample(probs[-1], positions, active))
            self._record_draft(0, active, time.perf_counter() - started)
        counts = [self.gamma if on else 0 for on in active]
        origins = [[self.stats.name] * count for count in counts]
        return Proposal(counts, torch.stack(tokens, 1), torch.stack(probs, 1), origins)

    def switch_off(self) -> None:
        """Its distributions are not finite. It proposes nothing any more, if it is optional."""
        if self._on_not_finite is None:
            raise NotFiniteError
        self._on_not_finite()
        self._is_off = True

    def round(self, sequences: list[list[int]], active: list[bool]) -> tuple[list[Emitted], Tensor]:
        """Lets the stage below guess, and verifies its guesses; returns what `verify` does."""
        if self.below is None:
            proposal = Proposal.nothing(len(sequences))
        else:
            proposal = self.below.propose(sequences, active)
        started = time.perf_counter()
        emitted, probs_BNV = self.verify(sequences, active, proposal)
        self._record(proposal, emitted, time.perf_counter() - started)
        return emitted, probs_BNV

    def verify(
        self, sequences: list[list[int]], active: list[bool], proposal: Proposal
    ) -> tuple[list[Emitted], Tensor]:
        """Verifies a proposal in one forward pass and appends the outcome to the active rows.

        Returns what was appended, and the distributions (B, N + 1, V) of this level, of which the
        tokens appended to row b follow the first ones.
        """
        starts = [len(sequence) for sequence in sequences]
        probs_BNV = self.runner.next_probs(sequences, active, proposal)
        verdict = self._source.verify(proposal, probs_BNV, starts, active)
        rows = enumerate(active)
        emitted = [_emitted(proposal, verdict, b) if on else Emitted([], []) for b, on in rows]
        for sequence, new in zip(sequences, emitted, strict=True):
            sequence += new.tokens
        self.crop([start + n for start, n in zip(starts, verdict.num_accepted, strict=True)])
        if verdict.is_damaged:
            assert self.below is not None
            self.below.switch_off()
        return emitted, probs_BNV

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        if not self._is_off:
            started = time.perf_counter()
            self.runner.prepare(sequences, active)
            self._tuner.note_catching_up(self.stats.name, time.perf_counter() - started)

    def crop(self, lengths: list[int]) -> None:
        """Drops what was rejected, here and in the stages below."""
        self.runner.crop(lengths)
        if self.below is not None:
            self.below.crop(lengths)

    def reset(self, b: int) -> None:
        self.runner.reset(b)

    def _record_draft(self, num_before: int, active: list[bool], seconds: float) -> None:
        """Notes a pass that guessed one token of each active row, behind so many in the block."""
        self.stats.seconds += seconds
        self._tuner.note_round(self.stats.name, num_before, seconds)
        for _ in range(sum(active)):
            self.stats.record(0, 0)

    def _record(self, proposal: Proposal, emitted: list[Emitted], seconds: float) -> None:
        name, proposer = self.stats.name, self.below.stats.name if self.below is not None else None
        self.stats.seconds += seconds
        self._tuner.note_round(name, max(proposal.counts), seconds)
        for row, num_draft in zip(emitted, proposal.counts, strict=True):
            if row.tokens:
                num_accepted = len(row.tokens) - 1
                num_tested = self.stats.record(num_draft, num_accepted)
                if proposer is not None:
                    # No guess at all counts as one that was rejected: nothing was gained.
                    self._tuner.note_acceptance(proposer, max(num_tested, 1), num_accepted)


def _emitted(proposal: Proposal, verdict: Verdict, b: int) -> Emitted:
    n = verdict.num_accepted[b]
    own = "bonus" if n == proposal.counts[b] else "recovered"
    tokens = [*verdict.guesses[b][:n], verdict.next_tokens[b]]
    return Emitted(tokens, [*proposal.origins[b][:n], own])


class Cascade:
    """All stages of a run and the texts they extend; every `step` commits at least one token."""

    def __init__(
        self,
        sequences: list[list[int]],
        stats: Stats,
        tuner: Autotuner,
        target: Level,
        retrieval: Level | None = None,
        drafter: Stage | None = None,
    ) -> None:
        """`sequences` are the texts, a list per row, extended in place. `tuner` says before each
        step which stages take part; `stats` are those of the run."""
        self.sequences = sequences
        self.active = [True] * len(sequences)
        self._stats = stats
        self.tuner = tuner
        self._target = target
        self._retrieval = retrieval
        self._drafter = drafter

    def start(self, rows: Collection[int] | None = None) -> list[Emitted]:
        """Samples the first tokens of these rows, or of all, by the target alone, whose cache lacks
        the last token of each prompt. From then on every step extends them."""
        nothing = Proposal.nothing(len(self.sequences))
        starting = [rows is None or b in rows for b in range(len(self.sequences))]
        emitted, _ = self._target.verify(self.sequences, starting, nothing)
        self._commit(emitted, starting)
        self.active = [on or new for on, new in zip(self.active, starting, strict=True)]
        self._prepare(self.tuner.plan)
        return emitted

    def step(self) -> list[Emitted]:
        """Extends every active row by the accepted guesses and one token of the target's own."""
        plan = self.tuner.choose()
        self._prepare(plan)
        emitted, _ = self._target.round(self.sequences, self.active)
        self._commit(emitted, self.active)
        self._stats.steps_per_plan[str(plan)] = self._stats.steps_per_plan.get(str(plan), 0) + 1
        self._stats.break_even = self.tuner.break_even()
        return emitted

    def _prepare(self, plan: StepPlan) -> None:
        """Stacks the stages of a plan and lets them catch up with the text."""
        started = time.perf_counter()
        for stage in self._stack(plan):
            stage.prepare(self.sequences, self.active)
        self._stats.commit_seconds += time.perf_counter() - started

    def _stack(self, plan: StepPlan) -> list[Stage]:
        """Puts the stages of a plan on top of one another; returns them from the lowest upwards."""
        stages: list[Stage] = []
        if plan.uses_drafter:
            assert self._drafter is not None
            self._drafter.gamma = plan.gamma1
            stages.append(self._drafter)
        if plan.uses_retrieval:
            assert self._retrieval is not None
            self._retrieval.gamma = plan.gamma2
            self._retrieval.below = stages[-1] if stages else None
            stages.append(self._retrieval)
        self._target.below = stages[-1] if stages else None
        return [*stages, self._target]

    def _commit(self, emitted: list[Emitted], active: list[bool]) -> None:
        """Brings what became certain into the caches: the one place for it.

        The full cache was cropped to the accepted tokens when they were verified. The retrieval
        cache takes over their exact K and V, and is rebuilt if that is due. The drafter's cache
        slides and catches up before the next step that uses it (`Stage.prepare`).
        """
        started = time.perf_counter()
        if self._retrieval is not None:
            has_guessed = self._target.below is self._retrieval
            self._retrieval.runner.commit(emitted, active, has_guessed=has_guessed)
        self._stats.commit_seconds += time.perf_counter() - started

    def retire(self, b: int) -> None:
        """Ends row b. Its caches are emptied, so that it costs no attention any more."""
        self.active[b] = False
        for stage in (self._target, self._retrieval, self._drafter):
            if stage is not None:
                stage.reset(b)
