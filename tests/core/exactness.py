"""The harness of the exactness tests: toy models of which everything is known, enumeration, and the
chi-square test.

`TableRunner` keeps the tokens it has read, as a cache does, and looks distributions up by them, so
a cascade that crops too much or too little gets wrong ones. `output_distribution` runs the real
cascade for every outcome of every random number, level by level, and adds the probabilities up.
"""

import functools
import itertools
import random

import torch
from torch import Tensor

from minitri.core.decoding.autotuner import Autotuner
from minitri.core.decoding.cascade import Cascade
from minitri.core.decoding.level import Level
from minitri.core.decoding.random_source import IndependentSource
from minitri.core.decoding.text_filters import filtered_logits, paths_of
from minitri.core.decoding.verification import Output, Proposal, verify, verify_block
from minitri.core.runner import ModelRunner
from minitri.core.settings import StepPlan
from minitri.core.stats import Clock, Meter, Stats


class Table:
    """A random distribution over V tokens for every context, float64; some probabilities are 0."""

    def __init__(self, V: int, seed: int, *, near: "Table | None" = None) -> None:
        """`near`: a table to stay close to, as a drafter's is to its target's."""
        self.V, self.seed, self.near = V, seed, near
        self.row = functools.cache(self._row)

    def _row(self, context: tuple[int, ...]) -> Tensor:
        generator = random.Random(f"{self.seed} {context}")
        weights = exactly([generator.choice([0.0, 0.2, 0.5, 1.0, 2.0]) for _ in range(self.V)])
        weights[generator.randrange(self.V)] += 0.3
        own = weights / weights.sum()
        return own if self.near is None else 0.5 * own + 0.5 * self.near.row(context)


def exactly(numbers) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


class TableRunner:
    """Distributions for the tokens that have been read, at first all but the last of the prompt."""

    def __init__(self, table: Table, batch_size: int, text_filters=()) -> None:
        """`text_filters`: of each row, those that all stages share."""
        self.table = table
        self.cache = self
        self.text_filters = [*text_filters] or [None] * batch_size
        self.memory = [PROMPT[:-1] for _ in range(batch_size)]

    def next_probs(self, sequences, active, guesses=None, source=None):
        tokens = [[]] * len(active) if guesses is None else guesses.tokens
        N = max(map(len, tokens)) + 1
        probs_BNV = torch.zeros(len(sequences), N, self.table.V, dtype=torch.float64)
        for b, sequence in enumerate(sequences):
            if active[b]:
                memory = self.memory[b]
                memory += [*sequence, *tokens[b]][len(memory) :]
                for i in range(len(tokens[b]) + 1):
                    context = tuple(memory[: len(memory) - len(tokens[b]) + i])
                    probs_BNV[b, i] = self.table.row(context)
        return self.filtered(probs_BNV, paths_of(self.text_filters, sequences, active, tokens))

    def filtered(self, probs_BNV, paths):
        """The distributions after the product's own filters, if there are any."""
        logits_BNV = probs_BNV.log()
        if any(self.text_filters):
            logits_BNV = filtered_logits(logits_BNV, self.text_filters, paths)
            probs_BNV = logits_BNV.softmax(-1).nan_to_num()
        return Output(probs_BNV, logits_BNV, logits_BNV)

    def next_probs_after(self, sequences, drafted, active):
        read = zip(self.memory, drafted[-1].tolist(), strict=True)
        return self.next_probs([[*old, new] for old, new in read], active).probs_BNV.squeeze(1)

    draft = ModelRunner.draft

    def crop(self, lengths):
        for row, length in zip(self.memory, lengths, strict=True):
            del row[length:]

    def reset(self, b):
        self.memory[b].clear()

    def prepare(self, sequences, active):
        for own, sequence in zip(self.text_filters, sequences, strict=True):
            if own is not None:
                own.extend(sequence)


EDGE = 1e-9
"""How close to the edge of its cell a number is put: a biased one would fall into the next."""


def outcomes(
    proposal: Proposal, probs_BNV: Tensor, b: int, *, rule=verify
) -> list[tuple[float, list[float]]]:
    """Every outcome of a decision about row b, by the textbook: its probability, and uniform
    numbers that lead there, as the rule takes them. A test is passed or failed by a hair; a token
    is sampled just within the upper edge of its cell."""
    tokens, p_NV = proposal.tokens[b], probs_BNV[b]
    n, is_block = len(tokens), rule is verify_block
    q_NV = proposal.probs_BNV[b] / proposal.probs_BNV[b].sum(1, keepdim=True)
    ratios = [float(p_NV[i, token] / q_NV[i, token]) for i, token in enumerate(tokens)]
    scales = [1.0] * (n + 1)
    for i, ratio in enumerate(ratios if is_block else []):
        scales[i + 1] = min(1.0, scales[i] * ratio)
    rests = [(scales[i] * p_NV[i] - q_NV[i]).clamp_min(0) for i in range(n)] + [p_NV[n]]
    chances = [min(1.0, ratio) for ratio in ratios]
    if is_block:  # the longest prefix that passes stays
        for i in range(1, n):
            left = float(rests[i].sum())
            chances[i - 1] = 1.0 if scales[i] == 1 else left / (left + 1 - scales[i])
        chances[n - 1 :] = scales[1:][n - 1 :]
    found = []
    for num_kept in range(n + 1):
        numbers, weight = [0.5] * n, 1.0
        for i in range(max(num_kept - 1, 0), n) if is_block else range(min(num_kept + 1, n)):
            is_passed, chance = i < num_kept, chances[i]
            numbers[i] = chance * (1 - EDGE) if is_passed else chance + (1 - chance) * EDGE
            weight *= chance if is_passed else 1 - chance
        if weight > 0:
            rest_V = rests[num_kept] / rests[num_kept].sum()
            found += [(weight * share, [*numbers, at]) for share, at in cells(rest_V)]
    return found


def cells(probs: Tensor) -> list[tuple[float, float]]:
    """The probability of each possible token, and a number in its cell of the CDF."""
    ends = zip(probs, probs.cumsum(0), strict=True)
    return [(float(share), float(end - share * EDGE)) for share, end in ends if share > 0]


class ScriptedSource(IndependentSource):
    """A random source that follows a script per row, and notes decisions beyond them."""

    def __init__(self, scripts: list[list[list[float]]], rule=verify) -> None:
        super().__init__("block" if rule is verify_block else "token")
        self.scripts, self.rule = [iter(script) for script in scripts], rule
        self.frontier: dict[int, list[tuple[float, list[float]]]] = {}

    def sample(self, probs_BV, starts, active):
        self.drawn = self.script(Proposal.nothing(len(active)), probs_BV.unsqueeze(1), active)
        return super().sample(probs_BV, starts, active)

    def verify(self, proposal, probs_BNV, starts, active):
        self.drawn = self.script(proposal, probs_BNV, active)
        return super().verify(proposal, probs_BNV, starts, active)

    def numbers(self, counts, starts, active):
        return self.drawn

    def script(self, proposal, probs_BNV, active):
        uniforms_BN = torch.zeros(len(active), max(proposal.counts) + 1, dtype=torch.float64)
        for b, n in enumerate(proposal.counts):
            textbook = functools.partial(outcomes, proposal, probs_BNV, b, rule=self.rule)
            if active[b] and (found := self.next_numbers(b, textbook)):
                uniforms_BN[b, [*range(n), -1]] = exactly(found)
        return uniforms_BN

    def next_numbers(self, b, textbook):
        """What the script says; notes the outcomes of a decision that it says nothing of."""
        found = next(self.scripts[b], None)
        if found is None and b not in self.frontier:
            self.frontier[b] = textbook()
        return found


PROMPT = [0, 1]


class ScheduledTuner(Autotuner):
    """Takes the given plans, one after the other, whatever they cost."""

    def __init__(self, plans):
        super().__init__(list(plans), lambda stage, num_guesses: 1.0, use_clock=False)
        self._schedule = itertools.cycle(plans)

    def choose(self):
        self.plan = next(self._schedule)
        return self.plan


def chain_level(name, meter, table, text_filters, source) -> Level:
    return Level(name, meter, TableRunner(table, len(text_filters), text_filters), source)


def toy_cascade(
    source, batch_size, tables, plans, *, make_filters=lambda: None, make_level=chain_level
) -> Cascade:
    """Stages over tables for target, retrieval level and drafter, None for those that are left out.
    All rows take part from the first step on, without `start`."""
    text_filters = [make_filters() for _ in range(batch_size)]
    meter = Meter(Stats(), ScheduledTuner(plans), Clock())
    names = "target", "retrieval", "draft"
    stages = [
        table and make_level(name, meter, table, text_filters, source)
        for table, name in zip(tables, names, strict=True)
    ]
    target, retrieval, drafter = stages
    texts = [list(PROMPT) for _ in range(batch_size)]
    cascade = Cascade(texts, meter, target, drafter, retrieval)
    cascade.active = [True] * batch_size
    return cascade


def largest_error(
    V,
    gamma1,
    gamma2,
    *,
    seed=0,
    horizon=3,
    num_steps=1,
    rule=verify,
    by_definition=lambda table: table,
    make_source=ScriptedSource,
    plans=None,
    **settings,
) -> float:
    """How far the first `horizon` tokens of a cascade over random tables are from the target's
    distribution, `by_definition` of filters: all random numbers of a few steps, then the exact
    target goes on. A gamma of 0 leaves its stage out."""
    target = Table(V, seed)
    middle = Table(V, seed + 1, near=target) if gamma2 else None
    draft = Table(V, seed + 2, near=target) if gamma1 else None
    exact = by_definition(target)
    total, wanted = (torch.zeros((V,) * horizon, dtype=torch.float64) for _ in range(2))
    add_up(wanted, (), 1.0, exact, horizon)
    paths: list[tuple[float, list[list[float]]]] = [(1.0, [])]
    while paths:
        source = make_source([script for _, script in paths], rule)
        tables = target, middle, draft
        schedule = plans or [StepPlan("all stages", gamma1, gamma2)]
        cascade = toy_cascade(source, len(paths), tables, schedule, **settings)
        for _ in range(num_steps):
            cascade.step()
        if not plans and "make_filters" not in settings:  # a grammar may leave nothing to guess
            assert all(stage.stats.num_rounds for stage in cascade.stages)
        longer = []
        for b, (weight, script) in enumerate(paths):
            if b in source.frontier:
                longer += [(weight * share, [*script, more]) for share, more in source.frontier[b]]
            else:
                tokens = tuple(cascade.sequences[b][len(PROMPT) :])
                assert len(tokens) >= num_steps  # every step of every row adds one at least
                add_up(total, tokens, weight, exact, horizon)
        paths = longer
    return float((total - wanted).abs().max())


def add_up(total, tokens: tuple[int, ...], weight: float, target: Table, horizon: int) -> None:
    if len(tokens) >= horizon:
        total[tokens[:horizon]] += weight
        return
    for token, share in enumerate(target.row((*PROMPT, *tokens))):
        if share > 0:
            add_up(total, (*tokens, token), weight * float(share), target, horizon)


FALSE_ALARM = 1e-5
"""Odds of each test."""
LEAST = 1.25e-3
"""Rarer outcomes are put together; of 4,000 every cell expects five or more."""


def p_value(counts: Tensor, probs: Tensor) -> float:
    """Odds that a sound engine is as far off; an outcome of probability 0 makes it 0."""
    if counts[probs == 0].sum() > 0:
        return 0.0
    observed, expected = common_cells(counts, probs), common_cells(probs, probs) * counts.sum()
    statistic = ((observed - expected) ** 2 / expected).sum()
    halves = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))


def common_cells(values: Tensor, probs: Tensor) -> Tensor:
    """Values of the common outcomes, and the sum of those of the rare ones."""
    is_common = probs >= LEAST
    is_rare = (probs > 0) & ~is_common
    rare = [values[is_rare].sum().view(1)] if is_rare.any() else []
    return torch.cat([values[is_common], *rare])
