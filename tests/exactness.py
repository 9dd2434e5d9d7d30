"""The harness of the exactness tests: toy models of which everything is known, and the sum over all coins.

`TableReader` stands where a model with a cache stands: it keeps the tokens it has read, as a cache does, and looks laws
up by them, so a cascade that forgets too much or too little gets wrong laws. `law_of_steps` runs the real cascade for
every outcome of every coin, level by level, and adds the probabilities up: no sampling, no tolerance but rounding.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from functools import cache

import torch

from minitri.decoding.cascade import Cascade, Level
from minitri.decoding.stats import LevelStats
from minitri.decoding.verification import Proposal, verify


class Laws:
    """A random law over V tokens for every context, float64; some tokens have probability 0."""

    def __init__(self, V: int, seed: int, *, near: Laws | None = None) -> None:
        """`near`: laws to stay close to, as a drafter's are to its target's."""
        self.V, self.seed, self.near = V, seed, near
        self.row = cache(self._row)

    def _row(self, context: tuple[int, ...]) -> torch.Tensor:
        generator = random.Random(f"{self.seed} {context}")
        weights = torch.tensor(
            [generator.choice([0.0, 0.2, 0.5, 1.0, 2.0]) for _ in range(self.V)], dtype=torch.float64
        )
        weights[generator.randrange(self.V)] += 0.3
        own = weights / weights.sum()
        return own if self.near is None else 0.5 * own + 0.5 * self.near.row(context)


class TableReader:
    """Laws for the tokens that have been read and not been forgotten."""

    def __init__(self, laws: Laws, batch_size: int) -> None:
        self.laws = laws
        self.memory: list[list[int]] = [[] for _ in range(batch_size)]

    def read(self, sequences, counts, active):
        N = max(counts) + 1
        laws_BNV = torch.zeros(len(sequences), N, self.laws.V, dtype=torch.float64)
        for b, sequence in enumerate(sequences):
            if active[b]:
                self.memory[b] += sequence[len(self.memory[b]) :]
                for i in range(counts[b] + 1):
                    laws_BNV[b, i] = self.laws.row(tuple(self.memory[b][: len(self.memory[b]) - counts[b] + i]))
        return laws_BNV

    def forget(self, lengths):
        for row, length in zip(self.memory, lengths, strict=True):
            del row[length:]


EDGE = 1e-9
"""How close to the edge of its cell a coin is put, relative to the cell: a biased coin would fall into the next one."""
UPPER, BOTH = (EDGE,), (EDGE, 1 - EDGE)


def outcomes(
    proposal: Proposal, laws_BNV: torch.Tensor, b: int, edges: tuple[float, ...] = UPPER
) -> list[tuple[float, list[float]]]:
    """Every outcome of a decision about row b, written out by the textbook: its probability, and coins that lead there.

    The coins are those of `verify`: one per test, one for the recovered or bonus token. A test is passed or failed by a
    hair; a token is drawn just within the upper edge of its cell, or, if asked for, once at each edge.
    """
    tokens, found, reached, coins = proposal.tokens[b], [], 1.0, []
    for i, token in enumerate(tokens):
        p, q = laws_BNV[b, i], proposal.laws_BNV[b, i]
        accept = min(1.0, float(p[token] / q[token]))
        residual = (p - q).clamp_min(0)
        if accept < 1:
            failed = [*coins, accept + (1 - accept) * EDGE, *[0.5] * (len(tokens) - i - 1)]
            for share, coin in cells(residual / residual.sum(), edges):
                found.append((reached * (1 - accept) * share, [*failed, coin]))
        coins.append(accept * (1 - EDGE))
        reached *= accept
        if reached == 0:
            return found
    return found + [(reached * share, [*coins, coin]) for share, coin in cells(laws_BNV[b, len(tokens)], edges)]


def cells(law: torch.Tensor, edges: tuple[float, ...] = UPPER) -> list[tuple[float, float]]:
    """The probability of each possible token, and a number in its cell of the CDF, or its share at each of `edges`."""
    found = [(float(share), float(end)) for share, end in zip(law, law.cumsum(0), strict=True) if share > 0]
    return [(share / len(edges), end - share * edge) for share, end in found for edge in edges]


@dataclass
class Scripted:
    """Coins that follow a script per row, and note every decision that no script foresees."""

    scripts: list[list[list[float]]]
    verify = staticmethod(verify)
    step: list[int] = field(default_factory=list)
    frontier: dict[int, list[tuple[float, list[float]]]] = field(default_factory=dict)

    def judge(self, proposal, laws_BNV, starts, active):
        self.step = self.step or [0] * len(self.scripts)
        uniforms_BN = torch.zeros(len(active), max(proposal.counts) + 1, dtype=torch.float64)
        for b, script in enumerate(self.scripts):
            if not active[b]:
                continue
            if self.step[b] == len(script) and b not in self.frontier:
                self.frontier[b] = outcomes(proposal, laws_BNV, b)
            if self.step[b] < len(script):
                coins = script[self.step[b]]
                uniforms_BN[b, : len(coins) - 1] = torch.tensor(coins[:-1], dtype=torch.float64)
                uniforms_BN[b, -1] = coins[-1]
            self.step[b] += 1
        return self.verify(proposal, laws_BNV, uniforms_BN)


PROMPT = [0, 1]


def toy_cascade(coins, batch_size, target, middle, draft, gamma1, gamma2, level=Level) -> Cascade:
    """TriForce over tables; `None` for middle or draft leaves that stage out."""
    stage = None
    for laws, name, block in ((draft, "draft", gamma1), (middle, "retrieval", gamma2)):
        if laws is not None:
            stage = level(TableReader(laws, batch_size), stage, coins, LevelStats(name), block=block)
    top = level(TableReader(target, batch_size), stage, coins, LevelStats("target"), block=1)
    return Cascade(top, [list(PROMPT) for _ in range(batch_size)], lambda emitted, active: None)


def law_of_steps(build, horizon: int, target: Laws, *, num_steps: int = 1, verify_function=verify) -> torch.Tensor:
    """The law of the first `horizon` tokens that follow a prompt, (V,) * horizon: a few steps of a cascade, all coins.

    `build(coins, batch_size)` makes the cascade. Where the steps emit fewer tokens the exact target goes on.
    """
    law = torch.zeros((target.V,) * horizon, dtype=torch.float64)
    paths: list[tuple[float, list[list[float]]]] = [(1.0, [])]
    while paths:
        coins = Scripted([script for _, script in paths])
        coins.verify = verify_function
        cascade = build(coins, len(paths))
        for _ in range(num_steps):
            cascade.step()
        longer = []
        for b, (weight, script) in enumerate(paths):
            if b in coins.frontier:
                longer += [(weight * share, [*script, more]) for share, more in coins.frontier[b]]
            else:
                add_up(law, tuple(cascade.sequences[b][len(PROMPT) :]), weight, target, horizon)
        paths = longer
    return law


def add_up(law: torch.Tensor, tokens: tuple[int, ...], weight: float, target: Laws, horizon: int) -> None:
    if len(tokens) >= horizon:
        law[tokens[:horizon]] += weight
        return
    for token, share in enumerate(target.row((*PROMPT, *tokens))):
        if share > 0:
            add_up(law, (*tokens, token), weight * float(share), target, horizon)


def target_law(target: Laws, horizon: int) -> torch.Tensor:
    """What `law_of_steps` must give."""
    law = torch.zeros((target.V,) * horizon, dtype=torch.float64)
    for tokens in itertools.product(range(target.V), repeat=horizon):
        share = 1.0
        for i, token in enumerate(tokens):
            share *= float(target.row((*PROMPT, *tokens[:i]))[token])
        law[tokens] = share
    return law
