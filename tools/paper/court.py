"""Twelve rules to accept guesses, and what each does to the distribution of a text.

A rule says how a guess is drawn and what happens to it, in the terms of Algorithm 1 as one function
(`minitri/core/decoding/reference.py`). Every random number is an interval of [0, 1) that splits in
two where a comparison depends on it: so `outcomes` adds up all that a step can do, and nothing is
sampled. A rule is lossless if what a step emits, continued by the target, has the target's own
distribution.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from minitri.core.decoding.reference import Model, Probs, sample_one, verify_one

GAMMA = 2
"""Guesses of a step."""
HORIZON = GAMMA + 1
"""Tokens of a text that are compared."""
Text = tuple[int, ...]


class Uniform(float):
    """A uniform number of which an interval is known, narrower after each comparison."""

    def __init__(self, fork: Callable[[float], bool]) -> None:
        self.low = 0.0
        self.high = 1.0
        self._fork = fork

    def __new__(cls, fork: Callable[[float], bool]) -> "Uniform":  # noqa: ARG004
        return super().__new__(cls)

    def __lt__(self, bound: float) -> bool:
        if not self.low < bound < self.high:
            return self.high <= bound
        is_below = self._fork((bound - self.low) / (self.high - self.low))
        if is_below:
            self.high = bound
        else:
            self.low = bound
        return is_below

    def __mul__(self, scale: float) -> "Scaled":
        return Scaled(self, scale)


class Scaled(float):
    """A uniform number times a factor."""

    def __init__(self, number: Uniform, scale: float) -> None:
        self._number = number
        self._scale = scale

    def __new__(cls, number: Uniform, scale: float) -> "Scaled":  # noqa: ARG004
        return super().__new__(cls)

    def __lt__(self, bound: float) -> bool:
        return self._number < bound / self._scale if self._scale else bound > 0


def outcomes(run: Callable[[Callable[[], Uniform]], Text]) -> dict[Text, float]:
    """Probabilities of all results of a function of independent uniform numbers."""
    found = defaultdict[Text, float](float)
    path = list[bool]()
    while True:
        weight, depth = 1.0, 0

        def fork(share: float) -> bool:
            nonlocal weight, depth
            if depth == len(path):
                path.append(True)
            depth += 1
            weight *= share if path[depth - 1] else 1 - share
            return path[depth - 1]

        found[run(lambda: Uniform(fork))] += weight
        while path and not path[-1]:
            path.pop()
        if not path:
            return found
        path[-1] = False


Guess = Callable[[Probs, float], tuple[int, Probs]]
"""Draws a token from a drafter's distribution, and reports the q it is said to be from."""
Verify = Callable[[list[int], list[Probs], list[Probs], list[float]], list[int]]
"""From guesses, q, p and a number for each p: the tokens that a step emits."""


def honest(q: Probs, number: float) -> tuple[int, Probs]:
    return sample_one(q, number), q


def greedy(q: Probs, _: float) -> tuple[int, Probs]:
    return best(q), q


def filtered(q: Probs, number: float) -> tuple[int, Probs]:
    return sample_one(top_p(q), number), q


def by_token(guesses: list[int], q: list[Probs], p: list[Probs], u: list[float]) -> list[int]:
    return verify_one(guesses, q, p, u)


def by_block(guesses: list[int], q: list[Probs], p: list[Probs], u: list[float]) -> list[int]:
    """Sun et al. 2024, algorithm 2: the longest prefix whose own test passes."""
    weight, kept, kept_weight = 1.0, 0, 1.0
    for i, token in enumerate(guesses):
        weight = min(weight * p[i][token] / q[i][token], 1.0)
        passes = weight
        if i + 1 < len(guesses) and weight < 1:
            left = sum(residual(p[i + 1], q[i + 1], weight))
            passes = left / (left + 1 - weight)
        if u[i] < passes:
            kept, kept_weight = i + 1, weight
    last = residual(p[kept], q[kept], kept_weight) if kept < len(guesses) else p[kept]
    return [*guesses[:kept], sample_one(last if any(last) else p[kept], u[-1])]


def if_sampled(guesses: list[int], _: list[Probs], p: list[Probs], u: list[float]) -> list[int]:
    """The target's own sample of every position; a guess stands as long as it is that."""
    for i, token in enumerate(guesses):
        if (sampled := sample_one(p[i], u[i])) != token:
            return [*guesses[:i], sampled]
    return [*guesses, sample_one(p[-1], u[-1])]


def if_best(guesses: list[int], _: list[Probs], p: list[Probs], u: list[float]) -> list[int]:
    hard = [[float(x == best(each)) for x in range(len(each))] for each in p[:-1]]
    return walk(guesses, [*hard, p[-1]], u, lambda i, x: x == best(p[i]))


def if_in_top_k(guesses: list[int], _: list[Probs], p: list[Probs], u: list[float]) -> list[int]:
    return walk(guesses, p, u, lambda i, x: sum(each > p[i][x] for each in p[i]) < 2)


def if_typical(guesses: list[int], _: list[Probs], p: list[Probs], u: list[float]) -> list[int]:
    """Cai et al. 2024, section 3.3.1, with their epsilon 0.09 and delta 0.3."""
    return walk(guesses, p, u, lambda i, x: p[i][x] > min(0.09, 0.3 * math.exp(-entropy(p[i]))))


def recovered_from_p(
    guesses: list[int], q: list[Probs], p: list[Probs], u: list[float]
) -> list[int]:
    return walk(guesses, p, u, lambda i, x: u[i] * q[i][x] < p[i][x])


def with_one_number(
    guesses: list[int], q: list[Probs], p: list[Probs], u: list[float]
) -> list[int]:
    """The number that rejected a guess also chooses what takes its place."""
    for i, token in enumerate(guesses):
        if not u[i] * q[i][token] < p[i][token]:
            return [*guesses[:i], sample_one(residual(p[i], q[i]), u[i])]
    return [*guesses, sample_one(p[-1], u[-1])]


def without_bonus(guesses: list[int], q: list[Probs], p: list[Probs], u: list[float]) -> list[int]:
    return by_token(guesses, q, p, u)[: len(guesses)]


def walk(
    guesses: list[int], p: list[Probs], u: list[float], accepts: Callable[[int, int], bool]
) -> list[int]:
    """The guesses before the first that fails its test, and a sample of p there."""
    num = next((i for i, token in enumerate(guesses) if not accepts(i, token)), len(guesses))
    return [*guesses[:num], sample_one(p[num], u[-1])]


def residual(p: Probs, q: Probs, weight: float = 1.0) -> list[float]:
    return [max(weight * p_x - q_x, 0.0) for p_x, q_x in zip(p, q, strict=True)]


def best(probs: Probs) -> int:
    return max(range(len(probs)), key=probs.__getitem__)


def entropy(probs: Probs) -> float:
    return -sum(x * math.log(x) for x in probs if x)


def top_p(probs: Probs, share: float = 0.9) -> list[float]:
    """The likeliest tokens that hold a share of the probability; not normalized."""
    kept, mass = [0.0] * len(probs), 0.0
    for x in sorted(range(len(probs)), key=probs.__getitem__, reverse=True):
        if mass < share:
            kept[x] = probs[x]
            mass += probs[x]
    return kept


class Rule(NamedTuple):
    """How guesses are drawn and verified."""

    guess: Guess
    verify: Verify
    is_keyed: bool = False
    """A position has one number, for the drafter and the verifier."""


RULES = {
    "token rule": Rule(honest, by_token),
    "block rule": Rule(honest, by_block),
    "coupled": Rule(honest, if_sampled, is_keyed=True),
    "sample and match": Rule(honest, if_sampled),
    "bonus token skipped": Rule(honest, without_bonus),
    "accept the argmax": Rule(honest, if_best),
    "accept what is in the top 2": Rule(honest, if_in_top_k),
    "typical acceptance": Rule(honest, if_typical),
    "greedy guess, soft q": Rule(greedy, by_token),
    "filtered guess, whole q": Rule(filtered, by_token),
    "recovered from p": Rule(honest, recovered_from_p),
    "one number for test and recovery": Rule(honest, with_one_number),
}
LOSSLESS = [*RULES][:5]


def step(
    rule: Rule, draft: Model, target: Model, uniform: Callable[[], Uniform], gamma: int = GAMMA
) -> Text:
    """The tokens of one step at the beginning of a text."""
    keyed = [uniform() for _ in range(gamma + 1)] if rule.is_keyed else []
    guesses, q = list[int](), list[Probs]()
    for i in range(gamma):
        token, reported = rule.guess(draft(guesses), keyed[i] if keyed else uniform())
        guesses.append(token)
        q.append(reported)
    p = [target(guesses[:i]) for i in range(gamma + 1)]
    return tuple(rule.verify(guesses, q, p, [*keyed] or [uniform() for _ in p]))


def distance(rule: Rule, draft: Model, target: Model) -> float:
    """Total variation of the first tokens of a text by a rule from the target's own."""
    texts = defaultdict[Text, float](float)

    def go_on(text: Text, weight: float, texts: dict[Text, float]) -> None:
        if len(text) == HORIZON:
            texts[text] += weight
        else:
            for token, share in enumerate(target([*text])):
                go_on((*text, token), weight * share, texts)

    for text, weight in outcomes(lambda uniform: step(rule, draft, target, uniform)).items():
        go_on(text, weight, texts)
    wanted = defaultdict[Text, float](float)
    go_on((), 1.0, wanted)
    return sum(abs(texts[it] - wanted[it]) for it in {**texts, **wanted}) / 2
