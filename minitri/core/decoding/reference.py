"""Algorithm 1 of TriForce as one function: for one text, in plain Python, every decision visible.

Models are functions from the tokens of a text to the distribution of the next one. The cascade
(`cascade.py`) is the fast form, for one to three stages and any number of rows. Given the same
random numbers and `verification="token"`, it emits the same tokens; its default accepts more.
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
    """Generates at least `num_tokens` tokens after the prompt, by the target's distribution.
    Each model maps a text to the next token's probabilities. `draft` guesses `gamma1` tokens a
    round, until `retrieval` has `gamma2` for the target. `uniform` draws from [0, 1). Whether
    another round runs depends on counts alone, and no token is discarded: so it is exact."""
    text = [*prompt, sample_one(target(prompt), uniform())]
    while len(text) < len(prompt) + num_tokens:
        block = list[int]()
        block_probs = list[Probs]()
        while len(block) < gamma2:
            guesses = list[int]()
            q = list[Probs]()
            for _ in range(gamma1):
                q.append(draft(text + block + guesses))
                guesses.append(sample_one(q[-1], uniform()))
            p = [retrieval(text + block + guesses[:i]) for i in range(gamma1 + 1)]
            emitted = verify_one(guesses, q, p, [uniform() for _ in p])
            block += emitted
            block_probs += p[: len(emitted)]
        p = [target(text + block[:i]) for i in range(len(block) + 1)]
        text += verify_one(block, block_probs, p, [uniform() for _ in p])
    return text[len(prompt) :]


def verify_one(
    guesses: list[int], q: list[Probs], p: list[Probs], uniforms: list[float]
) -> list[int]:
    """Returns the accepted guesses and one more token: recovered after a rejection, else bonus.
    Guess i was sampled from `q[i]`, and `p[i]` is the verifier's distribution there. One uniform
    number is for each test, and one for the last token (Leviathan et al. 2023, algorithm 1)."""
    for i, token in enumerate(guesses):
        if not uniforms[i] * q[i][token] < p[i][token]:
            residual = [max(p_x - q_x, 0.0) for p_x, q_x in zip(p[i], q[i], strict=True)]
            return [*guesses[:i], sample_one(residual if any(residual) else p[i], uniforms[-1])]
    return [*guesses, sample_one(p[-1], uniforms[-1])]


def sample_one(probs: Probs, uniform: float) -> int:
    """Samples a token by inverse CDF from a number in [0, 1); `probs` need not sum to 1."""
    cdf = list(accumulate(probs))
    return min(bisect_right(cdf, uniform * cdf[-1]), len(cdf) - 1)
