"""The harness of the exactness tests: toy models of which everything is known, and enumeration.

`TableRunner` keeps the tokens it has read, as a cache does, and looks distributions up by them, so
a cascade that crops too much or too little gets wrong ones. `output_distribution` runs the real
cascade for every outcome of every random number, level by level, and adds the probabilities up.
"""

import functools
import itertools
import random
from functools import cache

import torch

from minitri.core.decoding.autotuner import Autotuner
from minitri.core.decoding.cascade import Cascade
from minitri.core.decoding.level import Level, Output
from minitri.core.decoding.meter import Meter
from minitri.core.decoding.random_source import IndependentSource
from minitri.core.decoding.text_filters import filtered_logits, paths_of
from minitri.core.decoding.verification import Proposal, verify, verify_block
from minitri.core.settings import StepPlan
from minitri.core.stats import Clock, LevelStats, Stats


class Table:
    """A random distribution over V tokens for every context, float64; some probabilities are 0."""

    def __init__(self, V: int, seed: int, *, near: "Table | None" = None) -> None:
        """`near`: a table to stay close to, as a drafter's is to its target's."""
        self.V, self.seed, self.near = V, seed, near
        self.row = cache(self._row)

    def _row(self, context: tuple[int, ...]) -> torch.Tensor:
        generator = random.Random(f"{self.seed} {context}")
        weights = exactly([generator.choice([0.0, 0.2, 0.5, 1.0, 2.0]) for _ in range(self.V)])
        weights[generator.randrange(self.V)] += 0.3
        own = weights / weights.sum()
        return own if self.near is None else 0.5 * own + 0.5 * self.near.row(context)


def exactly(numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def probs_after(runner, text: list[int], num_guesses: int = 0) -> torch.Tensor:
    """A runner's distributions (1, N + 1, V) after the last tokens of a text."""
    certain, guesses = text[: len(text) - num_guesses], text[len(text) - num_guesses :]
    q_BNV = torch.ones(1, num_guesses, 1)
    proposal = Proposal.of([guesses], q_BNV, [["draft"]])
    return runner.next_probs([certain], [True], proposal).probs_BNV


class TableRunner:
    """Distributions for the tokens that have been read, at first all but the last of the prompt."""

    def __init__(self, table: Table, batch_size: int, text_filters=()) -> None:
        """`text_filters`: of each row, those that all stages share."""
        self.table = table
        self.text_filters = [*text_filters] or [None] * batch_size
        self.memory = [PROMPT[:-1] for _ in range(batch_size)]

    def next_probs(self, sequences, active, guesses=None):
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
        """By the product's own filters, if there are any."""
        logits_BNV = probs_BNV.log()
        if any(self.text_filters):
            logits_BNV = filtered_logits(logits_BNV, self.text_filters, paths)
            probs_BNV = logits_BNV.softmax(-1).nan_to_num()
        return Output(probs_BNV, logits_BNV, logits_BNV)

    def next_probs_after(self, sequences, drafted, active):
        pairs = zip(self.memory, drafted[-1].tolist(), strict=True)
        texts = [[*memory, token] for memory, token in pairs]
        return self.next_probs(texts, active).probs_BNV.squeeze(1)

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
UPPER, BOTH = (EDGE,), (EDGE, 1 - EDGE)


def outcomes(
    proposal: Proposal, probs_BNV: torch.Tensor, b: int, edges: tuple[float, ...] = UPPER
) -> list[tuple[float, list[float]]]:
    """Every outcome of a decision about row b, by the textbook: its probability, and uniform
    numbers that lead there, as `verify` takes them. A test is passed or failed by a hair; a token
    is sampled just within the upper edge of its cell, or once at each of `edges`."""
    found, reached = [], 1.0
    numbers = [0.5] * len(proposal.tokens[b])
    for i, token in enumerate(proposal.tokens[b]):
        p_V, q_V = probs_BNV[b, i], proposal.probs_BNV[b, i] / proposal.probs_BNV[b, i].sum()
        accept = min(1.0, float(p_V[token] / q_V[token]))
        if accept < 1:
            rest_V = (p_V - q_V).clamp_min(0)
            failed = [*numbers[:i], accept + (1 - accept) * EDGE, *numbers[i + 1 :]]
            found += [
                (reached * (1 - accept) * share, [*failed, number])
                for share, number in cells(rest_V / rest_V.sum(), edges)
            ]
        if accept == 0:
            return found
        numbers[i] = accept * (1 - EDGE)
        reached *= accept
    rest = cells(probs_BNV[b, len(numbers)], edges)
    return found + [(reached * share, [*numbers, number]) for share, number in rest]


def outcomes_of_block(
    proposal: Proposal, probs_BNV: torch.Tensor, b: int
) -> list[tuple[float, list[float]]]:
    """The same for block verification: the longest prefix that passes stays."""
    tokens, found, reached, numbers = proposal.tokens[b], [], 1.0, [0.5] * len(proposal.tokens[b])
    n, weights, odds = len(tokens), [1.0], [1.0]
    for i, token in enumerate(tokens):
        p, q = probs_BNV[b, i], proposal.probs_BNV[b, i]
        weights.append(min(1.0, weights[-1] * float(p[token] / q[token])))
    rests = [weights[i] * probs_BNV[b, i] - proposal.probs_BNV[b, i] for i in range(n)]
    rests = [rest.clamp_min(0) for rest in rests] + [probs_BNV[b, n]]
    for weight, rest in zip(weights[1:-1], rests[1:], strict=False):
        odds.append(1.0 if weight == 1 else float(rest.sum() / (rest.sum() + 1 - weight)))
    odds += weights[1:][-1:]
    for i in range(n, -1, -1):
        if odds[i] > 0 and reached > 0:
            passed = numbers.copy()
            if i > 0:
                passed[i - 1] = odds[i] * (1 - EDGE)
            found += [
                (reached * odds[i] * share, [*passed, number])
                for share, number in cells(rests[i] / rests[i].sum())
            ]
        if i > 0:
            numbers[i - 1] = odds[i] + (1 - odds[i]) * EDGE
        reached *= 1 - odds[i]
    return found


def cells(probs: torch.Tensor, edges: tuple[float, ...] = UPPER) -> list[tuple[float, float]]:
    """The probability of each possible token, or its share at each of `edges`, and a number in its
    cell of the CDF."""
    ends = zip(probs, probs.cumsum(0), strict=True)
    found = [(float(share), float(end)) for share, end in ends if share > 0]
    return [(share / len(edges), end - share * edge) for share, end in found for edge in edges]


class ScriptedSource(IndependentSource):
    """A random source that follows a script per row, and notes decisions beyond them."""

    def __init__(self, scripts: list[list[list[float]]], rule=verify) -> None:
        super().__init__(kind="block" if rule is verify_block else "token")
        self.scripts, self.step = scripts, [0] * len(scripts)
        self.rule = rule
        self.frontier: dict[int, list[tuple[float, list[float]]]] = {}

    def sample(self, probs_BV, starts, active):
        nothing = Proposal.nothing(len(active))
        self.drawn = self.numbers_of(nothing, probs_BV.unsqueeze(1), active)
        return super().sample(probs_BV, starts, active)

    def verify(self, proposal, probs_BNV, starts, active):
        self.drawn = self.numbers_of(proposal, probs_BNV, active)
        return super().verify(proposal, probs_BNV, starts, active)

    def numbers_of(self, proposal, probs_BNV, active):
        textbook = outcomes_of_block if self.rule is verify_block else outcomes
        uniforms_BN = torch.zeros(len(active), max(proposal.counts) + 1, dtype=torch.float64)
        for b, n in enumerate(proposal.counts):
            if active[b]:
                found = self.next_numbers(b, functools.partial(textbook, proposal, probs_BNV, b))
                numbers = exactly(found or [0.0] * (n + 1))
                uniforms_BN[b, :n], uniforms_BN[b, -1] = numbers[:-1], numbers[-1]
        return uniforms_BN

    def numbers(self, counts, starts, active):
        return self.drawn

    def next_numbers(self, b, textbook):
        """What the script says; notes the outcomes of a decision that it says nothing of."""
        self.step[b] += 1
        if self.step[b] <= len(self.scripts[b]):
            return self.scripts[b][self.step[b] - 1]
        if b not in self.frontier:
            self.frontier[b] = textbook()
        return None


PROMPT = [0, 1]


class ScheduledTuner(Autotuner):
    """Takes the given plans, one after the other, whatever they cost."""

    def __init__(self, plans):
        super().__init__(list(plans), lambda stage, num_guesses: 1.0, use_clock=False)
        self._schedule = itertools.cycle(plans)

    def choose(self):
        self.plan = next(self._schedule)
        return self.plan


def toy_cascade(
    source,
    batch_size,
    target,
    middle,
    draft,
    gamma1,
    gamma2,
    *,
    plans=None,
    make_filters=lambda: None,
    make_level=None,
) -> Cascade:
    """TriForce over tables; `None` for middle or draft leaves that stage out. All rows take part
    from the first step on, without `start`. A stage is made by `make_level(table, filters, source,
    stats, meter)`; by default it guesses chains."""
    text_filters = [make_filters() for _ in range(batch_size)]
    names = {(False, False): "autoregressive", (False, True): "naive"}
    names |= {(True, False): "retrieval", (True, True): "triforce"}
    name = names[middle is not None, draft is not None]
    gammas = gamma1 if draft else 0, gamma2 if middle else 0
    plans = plans or [StepPlan(name, *gammas)]
    meter = Meter(Stats(), ScheduledTuner(plans), Clock())

    def make(table, name):
        if table is None:
            return None
        return (make_level or chain_level)(table, text_filters, source, LevelStats(name), meter)

    stages = make(target, "target"), make(middle, "retrieval"), make(draft, "draft")
    cascade = Cascade([list(PROMPT) for _ in range(batch_size)], meter, *stages)
    cascade.active = [True] * batch_size
    return cascade


def chain_level(table, text_filters, source, stats, meter) -> Level:
    return Level(TableRunner(table, len(text_filters), text_filters), source, stats, meter)


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
    **settings,
) -> float:
    """How far the first `horizon` tokens of a cascade over random tables are from the target's
    distribution, `by_definition` of filters. A gamma of 0 leaves its stage out."""
    target = Table(V, seed)
    middle = Table(V, seed + 1, near=target) if gamma2 else None
    draft = Table(V, seed + 2, near=target) if gamma1 else None

    def build(source, batch_size):
        stages = target, middle, draft
        return toy_cascade(source, batch_size, *stages, gamma1, gamma2, **settings)

    exact = by_definition(target)
    probs = output_distribution(
        build, horizon, exact, num_steps=num_steps, rule=rule, make_source=make_source
    )
    return float((probs - target_distribution(exact, horizon)).abs().max())


def output_distribution(
    build, horizon: int, target: Table, *, num_steps, rule, make_source
) -> torch.Tensor:
    """The distribution of the first `horizon` tokens after a prompt, (V,) * horizon: a few steps of
    what `build(source, batch_size)` makes, all random numbers; then the exact target goes on."""
    total = torch.zeros((target.V,) * horizon, dtype=torch.float64)
    paths: list[tuple[float, list[list[float]]]] = [(1.0, [])]
    while paths:
        source = make_source([script for _, script in paths], rule)
        cascade = build(source, len(paths))
        for _ in range(num_steps):
            cascade.step()
        longer = []
        for b, (weight, script) in enumerate(paths):
            if b in source.frontier:
                longer += [(weight * share, [*script, more]) for share, more in source.frontier[b]]
            else:
                tokens = tuple(cascade.sequences[b][len(PROMPT) :])
                assert len(tokens) >= num_steps  # every step of every row adds one at least
                add_up(total, tokens, weight, target, horizon)
        paths = longer
    return total


def add_up(total, tokens: tuple[int, ...], weight: float, target: Table, horizon: int) -> None:
    if len(tokens) >= horizon:
        total[tokens[:horizon]] += weight
        return
    for token, share in enumerate(target.row((*PROMPT, *tokens))):
        if share > 0:
            add_up(total, (*tokens, token), weight * float(share), target, horizon)


def target_distribution(target: Table, horizon: int) -> torch.Tensor:
    """What `output_distribution` must give."""
    probs = torch.zeros((target.V,) * horizon, dtype=torch.float64)
    add_up(probs, (), 1.0, target, horizon)
    return probs
