"""Chapter 2: what a token costs by each method where the KV cache is larger than the weights."""

import random
from collections import Counter
from functools import cache

from minitri.core.decoding.reference import Model, Probs, triforce
from minitri.core.roofline import CARDS, Workload
from minitri.files.named_models import MODELS

STEPS = 1000
LLAMA, DRAFT = MODELS["llama2-7b-128k"].shape, MODELS["llama-68m"].shape
WORK = Workload(LLAMA, DRAFT, num_tokens=122_880, num_retrieved=4096)
NOISE = {"draft": 0.62, "retrieval": 0.1, "target": 0.0}  # in toy models, to count tokens
MS = {stage: 1e3 * WORK.seconds(CARDS[80], stage, 0) for stage in NOISE}  # by bytes: no timing


@cache
def table(name: str, last: tuple[int, ...]) -> Probs:
    """A random distribution of 8 tokens after the last two."""
    weights = [random.Random(f"{name} {last} {token}").random() ** 6 for token in range(8)]
    return [weight / sum(weights) for weight in weights]


def toy(stage: str, calls: Counter[str]) -> Model:
    """The target's distributions, mixed with noise of the stage's own."""

    def model(text: list[int]) -> Probs:
        calls[stage] += 1
        exact, other = (table(name, tuple(text[-2:])) for name in ("target", stage))
        return [p + NOISE[stage] * (own - p) for p, own in zip(exact, other, strict=True)]

    return model


def row(method: str, proposer: str, gamma1: int, gamma2: int) -> None:
    """Counts with gamma2 tokens by the proposer, which verifies gamma1 of the draft at a time."""
    calls, text = Counter[str](), [0, 1]
    models = toy("draft", calls), toy(proposer, calls), toy("target", calls)
    uniform = random.Random(0).random
    for _ in range(STEPS):  # each call is a token of the target's own, then one step
        text += triforce(text, 2, *models, gamma1=gamma1, gamma2=gamma2, uniform=uniform)
    num_tokens = len(text) - 2 - STEPS
    rounds = calls[proposer] / (gamma1 + 1)
    ms = STEPS * MS["target"] + rounds * (MS[proposer] + gamma1 * MS["draft"])
    columns = num_tokens / STEPS, rounds / STEPS, ms / num_tokens, MS["target"] * num_tokens / ms
    print(f"{method:14}" + "".join(f"{number:18.2f}" for number in columns))


if __name__ == "__main__":
    print("ms of a pass:", {stage: round(ms, 1) for stage, ms in MS.items()})
    print("method             tokens a step   passes below it          ms/token           speedup")
    row("autoregressive", "draft", 0, 0)
    row("naive", "draft", 0, 4)
    row("retrieval", "retrieval", 0, 6)
    row("triforce", "retrieval", 2, 6)
