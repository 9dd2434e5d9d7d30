"""One token of the hierarchy by the published code's rule and by ours, as formulas; and a toy small
enough to add up every text that it can write.

In the toy, tables of random logits, a row for every context, stand for the drafter, the target with
its retrieval cache, and the target. The middle level tests one drafted token a round, as the
published code does. In float64, by the definitions, without the code that they are about.

Legend: V vocabulary; tensors may have more dimensions before that.
"""

import functools
import random
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

V = 4
GAMMA2 = 2
"""Tokens that the middle level collects, at least."""
HORIZON = 3
"""Tokens of a text that are compared."""
TARGET, MIDDLE, DRAFT = range(3)
"""The levels."""
Context = tuple[int, ...]
Texts = Counter[Context]
"""The probability of each text."""
Shares = dict[int, Tensor]
"""The probabilities (V,) of the next token, by the level it is from; they sum to 1 together."""


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """norm(max(p - q, 0)); zeros where p = q."""
    left_V = (p_V - q_V).clamp_min(0)
    return left_V / left_V.sum(-1, keepdim=True).clamp_min(1e-300)


def proposed(q_V: Tensor, phat_V: Tensor, is_exact: bool) -> Shares:
    """What the middle level hands on: the drafter's guess, or its own correction from the residual,
    or by the published rule from p-hat."""
    common_V = torch.minimum(q_V, phat_V)
    left_V = residual(phat_V, q_V) if is_exact else phat_V
    return {DRAFT: common_V, MIDDLE: (1 - common_V.sum(-1, keepdim=True)) * left_V}


def verified(guesses: Shares, phat_V: Tensor, p_V: Tensor) -> Shares:
    """What the target makes of guesses that are said to follow p-hat."""
    passes_V = torch.where(phat_V > 0, p_V / phat_V, 0.0).clamp_max(1)
    accepted = {level: guess_V * passes_V for level, guess_V in guesses.items()}
    rejected = 1 - sum(accepted.values(), torch.zeros_like(p_V)).sum(-1, keepdim=True)
    return accepted | {TARGET: rejected * residual(p_V, phat_V)}


@dataclass(frozen=True)
class Toy:
    """The three levels."""

    seed: int
    temperature: float

    @functools.cache  # noqa: B019 (toys are few)
    def probs(self, level: int, context: Context) -> Tensor:
        """Of a level's next token (V,); the logits of the others are halfway to the target's."""
        tables = [random.Random(f"{3 * self.seed + it} {context}") for it in {TARGET, level}]
        logits = [[table.gauss(0, 1.5) for _ in range(V)] for table in tables]
        logits_V = torch.tensor(logits, dtype=torch.float64).mean(0)
        if self.temperature == 0:
            return torch.nn.functional.one_hot(logits_V.argmax(), V).double()
        return (logits_V / self.temperature).softmax(0)

    def next_token(self, tokens: Context, last: int, is_exact: bool) -> Shares:
        """After `tokens`, of which the last is from this level."""
        p_V, phat_V, q_V = (self.probs(level, tokens) for level in (TARGET, MIDDLE, DRAFT))
        if last == TARGET or (last == MIDDLE and len(tokens) >= GAMMA2):
            return {TARGET: p_V}  # it corrected a guess, or accepted them all, and goes on
        if last == DRAFT:
            return verified({MIDDLE: phat_V}, phat_V, p_V)  # the bonus token
        return verified(proposed(q_V, phat_V, is_exact), phat_V, p_V)

    def texts(self, is_exact: bool, tokens: Context = (), last: int = MIDDLE) -> Texts:
        """What a step emits, and the target goes on, after `tokens`."""
        if len(tokens) == HORIZON:
            return Texts({tokens: 1.0})
        texts = Texts()
        for level, probs_V in self.next_token(tokens, last, is_exact).items():
            for token, share in enumerate(probs_V.tolist()):
                for text, weight in self.texts(is_exact, (*tokens, token), level).items():
                    texts[text] += share * weight
        return texts


def toy_distance(seed: int, temperature: float, is_exact: bool) -> float:
    """Total variation of a toy's first tokens from the target's own."""
    toy = Toy(seed, temperature)
    texts, wanted = toy.texts(is_exact), toy.texts(is_exact, last=TARGET)
    return sum(abs(texts[it] - wanted[it]) for it in texts | wanted) / 2
