"""Chapter 6: Algorithm 1 summed over all its random numbers, and samples with common noise."""

import random
from collections import Counter
from functools import cache
from itertools import product
from unittest.mock import patch

import torch

from minitri.core.decoding.reference import Model, Probs, triforce, verify_one
from minitri.core.decoding.sampling import gumbel_argmax, noise_keys

table = cache(lambda key: random.Random(key).sample([0.5, 0.25, 0.25], 3))


def model(name: str) -> Model:
    """1/2, 1/4 and 1/4 in some order, so that outcomes change at multiples of 1/4 alone."""
    return lambda text: table(f"{name} {text}")


def other_q(guesses: list[int], q: list[Probs], p: list[Probs], u: list[float]) -> list[int]:
    """A bug: it does not go by the q that the guesses were sampled from."""
    return verify_one(guesses, [[0.5, 0.25, 0.25] for _ in q], p, u)


def error() -> float:
    """Total variation of the first two tokens from the target's, with gammas 1 and 1."""
    draft, retrieval, target = map(model, ("draft", "retrieval", "target"))
    counts = Counter[tuple[int, int]]()
    for numbers in product((1 / 8, 3 / 8, 5 / 8, 7 / 8), repeat=7):
        uniform = iter(numbers).__next__
        text = triforce([], 2, draft, retrieval, target, gamma1=1, gamma2=1, uniform=uniform)
        counts[text[0], text[1]] += 1
    pairs = product(range(3), repeat=2)
    return sum(abs(counts[a, b] / 4**7 - target([])[a] * target([a])[b]) for a, b in pairs) / 2


if __name__ == "__main__":
    print("total variation:", error())
    with patch("minitri.core.decoding.reference.verify_one", other_q):
        print(f"the same, with another q: {error():.3f}")
    keys_N = noise_keys(1, torch.arange(100_000))  # of a seed, at many places
    p_V, q_V = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    p_N, q_N = (gumbel_argmax(probs_V.expand(100_000, 3), keys_N) for probs_V in (p_V, q_V))
    shares = " ".join(f"{count / 100_000:.2f}" for count in p_N.bincount())
    print(f"coupled: tokens by p {shares}; the same by q in {(p_N == q_N).float().mean():.2f}")
