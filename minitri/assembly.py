"""From readers to a working cascade: which stages there are, and what they share.

`build_cascade` knows every part. While tokens are made, `Stages` stacks them as the tuner says, and is the one place in
which all caches take over what a step has made certain.

Legend: L layers, B batch, T tokens of a block, H query heads, D head dim.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from minitri.caches.retrieval import RetrievalCache
from minitri.decoding.cascade import Cascade, Emitted, Level, Stage
from minitri.decoding.random_source import Coins, CoupledCoins, IndependentCoins
from minitri.draft_runner import DraftReader
from minitri.decoding.drafters.ngram import NgramDrafter
from minitri.runner import Reader
from minitri.readers import Readers
from minitri.settings import Plan
from minitri.decoding.stats import LevelStats, Stats
from minitri.decoding.autotuner import Tuner, nominal_costs


class Stages:
    """The stages there are, and how they are stacked for the next step; a `Cascade` calls `steer` before every step.

    Also the place in which all caches take over what a step has made certain: a `Cascade` calls `commit` after it.
    """

    def __init__(
        self,
        sequences: list[list[int]],
        queries_LBTHD: Tensor,
        stats: Stats,
        tuner: Tuner,
        budgets: list[list[int]],
        *,
        target: Level,
        retrieval: Level | None,
        drafter: Level | NgramDrafter | None,
        retrieval_cache: RetrievalCache | None,
        draft_reader: DraftReader | NgramDrafter | None,
    ) -> None:
        self._sequences = sequences
        self._queries_LBTHD = queries_LBTHD
        self._stats = stats
        self._tuner = tuner
        self._budgets = {sum(rows): rows for rows in budgets}  # the tuner speaks of sums
        self._target = target
        self._retrieval = retrieval
        self._drafter = drafter
        self._retrieval_cache = retrieval_cache
        self._draft_reader = draft_reader
        self._stack(tuner.plan)

    def steer(self, active: list[bool]) -> None:
        """Stacks the stages, and sizes the retrieval cache, as the tuner says."""
        if not all(active):  # a stage that takes part again may not know yet that a row has ended
            lengths = [
                len(sequence) if on else 0
                for sequence, on in zip(self._sequences, active, strict=True)
            ]
            for stage in (self._retrieval, self._drafter):
                if stage is not None:
                    stage.forget(lengths)
        had_drafter = self._uses_drafter
        plan = self._tuner.choose()
        self._stats.steps_per_plan[str(plan)] = self._stats.steps_per_plan.get(str(plan), 0) + 1
        self._stats.break_even = self._tuner.break_even()
        if self._retrieval_cache is not None:
            self._retrieval_cache.resize(self._budgets[self._tuner.budget])
        self._stack(plan)
        if self._uses_drafter and not had_drafter and self._draft_reader is not None:
            self._draft_reader.commit(
                self._sequences, active
            )  # it has not followed the steps without it

    def commit(self, emitted: list[Emitted], active: list[bool]) -> None:
        """The small caches take over the exact K and V of the tokens that the last level let stand."""
        started = time.perf_counter()
        cache = self._retrieval_cache
        before = cache.rebuild_seconds if cache else 0.0
        if cache:
            for b, row in enumerate(emitted):
                if active[b]:
                    # The block was the token before, and the guesses; its first len(row.tokens) inputs stay.
                    queries_LTHD = self._queries_LBTHD[:, b, : len(row.tokens)]
                    was_rejected = row.origins[-1] == "recovered"
                    by_cache = self._target.below is self._retrieval
                    cache.commit(b, queries_LTHD, was_rejected=was_rejected, has_guessed=by_cache)
            self._stats.num_rebuilds = cache.num_rebuilds
            self._stats.budgets = list(cache.budgets) if len(self._budgets) > 1 else []
        if self._uses_drafter and self._draft_reader is not None:
            self._draft_reader.commit(self._sequences, active)
        rebuild_seconds = cache.rebuild_seconds - before if cache else 0.0
        self._stats.rebuild_seconds += rebuild_seconds
        self._stats.commit_seconds += time.perf_counter() - started - rebuild_seconds

    def _stack(self, plan: Plan) -> None:
        self._uses_drafter = plan.method in ("naive", "triforce")
        below: Stage | None = None
        if self._uses_drafter:
            assert self._drafter is not None
            below = self._drafter
            below.block = plan.gamma1
        if plan.method in ("retrieval", "triforce"):
            assert self._retrieval is not None
            self._retrieval.below, self._retrieval.block = below, plan.gamma2
            below = self._retrieval
        self._target.below = below


def build_cascade(
    readers: Readers,
    sequences: list[list[int]],
    seeds: list[int],
    stats: Stats,
    coins_of: Mapping[str, Coins] | None = None,
) -> Cascade:
    """The stages of the method that `readers` were made for, whose caches are empty; without a draft model n-grams are
    the drafter.

    `sequences` are the prompts, which the cascade extends in place. The retrieval cache, if there is one, is to observe
    the prompt while it is read. `coins_of`, by the name of a stage, is for benchmarks with made-up verdicts
    (`dummy.py`).
    """
    target, speculation, full = readers.target.model, readers.speculation, readers.full
    plans = speculation.plans
    coins: Coins = CoupledCoins(seeds) if speculation.coupled else IndependentCoins(seeds)
    coins_of = coins_of or dict.fromkeys(("draft", "retrieval", "target"), coins)
    stats.kv_cache_bytes = readers.num_cache_bytes
    stats.graphs = readers.graphs

    def level(name: str, reader: Reader) -> Level:
        stats.stages.append(LevelStats(name))
        return Level(reader, None, coins_of[name], stats.stages[-1], block=1)

    drafter: Level | NgramDrafter | None = None
    draft_reader: DraftReader | NgramDrafter | None = None
    if readers.draft is not None:
        drafter, draft_reader = level("draft", readers.draft), readers.draft
    elif any(plan.gamma1 for plan in plans):
        stats.stages.append(LevelStats("draft"))
        drafter = draft_reader = NgramDrafter(
            len(sequences),
            1,
            stats.stages[-1],
            vocab_size=target.config.vocab_size,
            device=target.device,
        )
    retrieval = level("retrieval", readers.retrieval) if readers.retrieval is not None else None
    top = level("target", readers.target)
    lengths = list(map(len, sequences))
    one_text = speculation.coupled or readers.target.sampling.temperature == 0
    is_exact = (
        target.dtype == torch.float32 and target.device.type == "cpu"
    )  # else a block's length may decide a tie
    may_watch_clock = speculation.timed or (one_text and is_exact)
    hosted = 1 - full.on_chip / target.config.num_layers
    nominal = nominal_costs(
        target, readers.draft.model if readers.draft else None, sum(lengths), hosted
    )
    most = (
        -(-readers.capacity // speculation.chunk_size) * speculation.chunk_size
    )  # no row can fill more
    choice = [[min(budget, most) for budget in rows] for rows in speculation.budgets_for(lengths)]
    tuner = Tuner(
        stats.stages, plans, nominal, timed=may_watch_clock, budgets=list(map(sum, choice)),
        budget=sum(min(speculation.budget_for(length), most) for length in lengths),
    )  # fmt: skip
    stages = Stages(
        sequences, readers.queries_LBTHD, stats, tuner, choice,
        target=top, retrieval=retrieval, drafter=drafter, retrieval_cache=readers.small, draft_reader=draft_reader,
    )  # fmt: skip
    return Cascade(top, sequences, stages.commit, stages.steer)
