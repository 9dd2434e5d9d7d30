"""Algorithm 1 of TriForce as one function: for one text, in plain Python, every decision visible.

Models are functions from the tokens of a text to the distribution of the next one: the drafter with
its streaming cache, the target with its retrieval cache, and the target with its full one. The
cascade (`cascade.py`) is the fast form, for any number of stages and rows; given the same random
numbers it emits the same tokens, if it verifies token by token (its default accepts more).
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

Probs = Sequence[float]
Model = Callable[[list[int]], Probs]


def triforce(
    prompt: list[int],
    num_tokens: int,
    draft: Model,
    retrieval: Model,
    target: Model,
    *,
    gamma1: int,
    gamma2: int,
    uniform: Callable[[], float],
) -> list[int]:
    """At least `num_tokens` tokens after the prompt, distributed as the target's own samples;
    `uniform` draws independent numbers from [0, 1). Whether another round is run depends on the
    number of guesses only, and no emitted token is discarded: both keep the distribution exact."""
    text = [*prompt, sample(target(prompt), uniform())]
    while len(text) < len(prompt) + num_tokens:
        block, block_probs = list[int](), list[Probs]()
        while len(block) < gamma2:
            guesses, q = list[int](), list[Probs]()
            for _ in range(gamma1):
                q.append(draft(text + block + guesses))
                guesses.append(sample(q[-1], uniform()))
            p = [retrieval(text + block + guesses[:i]) for i in range(gamma1 + 1)]
            verified = verify(guesses, q, p, [uniform() for _ in p])
            block += verified
            block_probs += p[: len(verified)]
        p = [target(text + block[:i]) for i in range(len(block) + 1)]
        text += verify(block, block_probs, p, [uniform() for _ in p])
    return text[len(prompt) :]


def verify(guesses: list[int], q: list[Probs], p: list[Probs], uniforms: list[float]) -> list[int]:
    """The accepted guesses and one token more: recovered after a rejection, else the bonus token.
    `q[i]` is what guess i was sampled from, `p[i]` the verifier's distribution there; there is one
    uniform number for each test, and one for the last token (Leviathan et al. 2023, algorithm 1).
    """
    for i, token in enumerate(guesses):
        if not uniforms[i] * q[i][token] < p[i][token]:
            residual = [max(own - theirs, 0.0) for own, theirs in zip(p[i], q[i], strict=True)]
            return [*guesses[:i], sample(residual if any(residual) else p[i], uniforms[-1])]
    return [*guesses, sample(p[-1], uniforms[-1])]


def sample(probs: Probs, uniform: float) -> int:
    """A token by inverse CDF; the probabilities need not sum to 1."""
    cdf = list(accumulate(probs))
    return min(bisect_right(cdf, uniform * cdf[-1]), len(cdf) - 1)
