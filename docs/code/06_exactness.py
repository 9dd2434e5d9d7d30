"""Chapter 6: Algorithm 1 summed over all its random numbers, and texts coupled to a seed."""

import random
from functools import cache, partial
from itertools import product
from unittest.mock import patch

import tokenizers
import torch

import minitri
from minitri.core.config import ModelConfig
from minitri.core.decoding.reference import Model, Probs, triforce, verify_one
from minitri.core.model.llama import Llama
from minitri.core.settings import METHODS
from minitri.text.tokenizer import Tokenizer

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
    odds = dict.fromkeys(product(range(3), repeat=2), 0.0)
    for numbers in product((1 / 8, 3 / 8, 5 / 8, 7 / 8), repeat=7):
        uniform = iter(numbers).__next__
        said = triforce([], 2, draft, retrieval, target, gamma1=1, gamma2=1, uniform=uniform)
        odds[said[0], said[1]] += 1 / 4**7
    return sum(abs(odds[a, b] - target([])[a] * target([a])[b]) for a, b in odds) / 2


def num_texts(coupled: bool) -> int:
    """How many different texts the methods write, with one seed, at temperature 0.8."""
    config = ModelConfig(2, 32, 48, 4, 2, 8, vocab_size=64, context_length=512)
    llama = Llama(config, dtype=torch.float64, device=torch.device("cpu"))
    for weight in llama.parameters():
        weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    words = Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()))
    complete = minitri.Engine(llama, words, llama).complete
    say = partial(complete, [*range(60)], seed=1, max_new_tokens=30, coupled=coupled)
    return len({say(method=it, temperature=0.8, budget=32).token_ids for it in METHODS})


if __name__ == "__main__":
    print("total variation:", error())
    with patch("minitri.core.decoding.reference.verify_one", other_q):
        print(f"the same, with another q: {error():.3f}")
    print(f"{len(METHODS)} methods, one seed: {num_texts(False)} texts; coupled: {num_texts(True)}")
