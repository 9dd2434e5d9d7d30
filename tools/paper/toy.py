"""A toy of the hierarchy, small enough to enumerate every text that it can write.

Three tables of random logits, a row for every context, stand for the drafter, the target with its
retrieval cache, and the target. The middle level tests one drafted token a round, as the published
code does, and corrects a rejected one by one of two rules. In float64, by the definitions, without
the code that they are about.

Legend: V vocabulary.
"""

import functools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

V = 4
GAMMA2 = 2
"""Tokens that the middle level collects, at least."""
HORIZON = 3
"""Tokens of a text that are compared."""
Context = tuple[int, ...]
Texts = Counter[Context]
"""The probability of each text."""


@dataclass(frozen=True)
class Table:
    """Distributions over V tokens for every context."""

    seed: int
    temperature: float
    near: "Table | None" = None
    """Halfway to whose logits these are."""

    def logits(self, context: Context) -> Tensor:
        """Random ones (V,)."""
        generator = random.Random(f"{self.seed} {context}")
        own = [generator.gauss(0, 1.5) for _ in range(V)]
        logits_V = torch.tensor(own, dtype=torch.float64)
        return logits_V if self.near is None else (logits_V + self.near.logits(context)) / 2

    @functools.cache  # noqa: B019 (toys are few)
    def probs(self, context: Context) -> Tensor:
        """Of the next token (V,)."""
        logits_V = self.logits(context)
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits_V.argmax(), V).double()
        return (logits_V / self.temperature).softmax(0)


@dataclass(frozen=True)
class Toy:
    """The three levels, and the middle one's rule."""

    target: Table
    middle: Table
    draft: Table
    is_exact: bool
    """Whether a rejected guess is corrected from the residual, not from p-hat."""

    def proposals(self, tokens: Context = ()) -> Iterator[tuple[float, Context]]:
        """Whatever the middle level may propose after `tokens`, with its probability."""
        if len(tokens) >= GAMMA2:
            yield 1.0, tokens
            return
        q_V = self.draft.probs(tokens)
        phat_V = self.middle.probs(tokens)
        common_V = torch.minimum(q_V, phat_V)
        left_V = residual(phat_V, q_V) if self.is_exact else phat_V
        for token in range(V):
            accepted = (*tokens, token)
            ways: list[tuple[Any, Context]] = [((1 - common_V.sum()) * left_V[token], accepted)]
            for bonus, share in enumerate(self.middle.probs(accepted)):
                ways.append((common_V[token] * share, (*accepted, bonus)))
            for weight, longer in ways:
                if weight > 0:
                    for share, proposal in self.proposals(longer):
                        yield float(weight) * share, proposal

    def texts(self) -> Texts:
        """The probabilities of the first tokens of what a step emits, and the target goes on."""
        texts = Texts()
        for weight, proposal in self.proposals():
            for number, token in enumerate(proposal):
                before = proposal[:number]
                p_V, phat_V = self.target.probs(before), self.middle.probs(before)
                passes = min(1.0, float(p_V[token] / phat_V[token]))
                for recovered, share in enumerate(residual(p_V, phat_V)):
                    self.go_on(texts, (*before, recovered), weight * (1 - passes) * float(share))
                weight *= passes
            self.go_on(texts, proposal, weight)
        return texts

    def go_on(self, texts: Texts, tokens: Context, weight: float) -> None:
        """Adds a text of this probability, as the target continues it."""
        if len(tokens) >= HORIZON or weight == 0:
            texts[tokens[:HORIZON]] += weight  # type: ignore[assignment]
            return
        for token, share in enumerate(self.target.probs(tokens)):
            self.go_on(texts, (*tokens, token), weight * float(share))


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """norm(max(p - q, 0)); zeros where p = q."""
    left_V = (p_V - q_V).clamp_min(0)
    return left_V / left_V.sum().clamp_min(1e-300)


def toy(seed: int, temperature: float, is_exact: bool) -> Toy:
    """Of random tables."""
    target = Table(3 * seed, temperature)
    middle = Table(3 * seed + 1, temperature, near=target)
    return Toy(target, middle, Table(3 * seed + 2, temperature, near=target), is_exact)


def toy_distance(seed: int, temperature: float, is_exact: bool) -> float:
    """Total variation of a toy's first tokens from the target's own."""
    made = toy(seed, temperature, is_exact)
    texts, wanted = made.texts(), Texts()
    made.go_on(wanted, (), 1.0)
    return sum(abs(texts[it] - wanted[it]) for it in texts | wanted) / 2
