"""Chapter 7: the autotuner on a simulated machine, while the text becomes harder to guess."""

import random
from collections import Counter
from itertools import product

from minitri.core.decoding.autotuner import Autotuner
from minitri.core.settings import SpeculationConfig, StepPlan

MS = {"draft": 2.0, "retrieval": 8.0, "target": 20.0}
# The probabilities that a guess of the drafter, and one with the retrieval cache, is accepted.
TEXTS = {"a copy": (0.9, 0.95), "a novel": (0.4, 0.95), "noise": (0.1, 0.2)}
ODDS = random.Random(0)


def seconds(stage: str, num_guesses: float) -> float:
    """Of a round; each guess that is verified costs 6 % of a pass."""
    return MS[stage] / 1000 * (1 + 0.06 * num_guesses)


TUNER = Autotuner(SpeculationConfig("auto").plans, seconds, use_clock=False)


def verify(proposer: str, rate: float, num_guesses: int) -> int:
    """Tokens of a round: the accepted guesses, and one more. The tuner learns the counts."""
    num_accepted = next((i for i in range(num_guesses) if ODDS.random() >= rate), num_guesses)
    if num_guesses:
        TUNER.note_acceptance(proposer, min(num_accepted + 1, num_guesses), num_accepted)
    return num_accepted + 1


def step(plan: StepPlan, draft_rate: float, retrieval_rate: float) -> tuple[int, float]:
    """Tokens and seconds of a step."""
    drafting = plan.gamma1 * seconds("draft", 0)
    if not plan.gamma2:
        num_tokens = verify("draft", draft_rate, plan.gamma1)
        return num_tokens, drafting + seconds("target", plan.gamma1)
    block, taken = 0, 0.0
    while block < plan.gamma2:
        block += verify("draft", draft_rate, plan.gamma1)
        taken += drafting + seconds("retrieval", plan.gamma1)
    return verify("retrieval", retrieval_rate, block), taken + seconds("target", block)


if __name__ == "__main__":
    print("text     steps with  plan                       speedup")
    for text, num_steps in product(TEXTS, (30, 270)):
        plans, num_tokens, taken = Counter[str](), 0, 0.0
        for _ in range(num_steps):
            plan = TUNER.choose()
            new, lasted = step(plan, *TEXTS[text])
            plans[str(plan)] += 1
            num_tokens += new
            taken += lasted
        [(most, count)] = plans.most_common(1)
        speedup = num_tokens / taken * seconds("target", 0)
        print(f"{text:8} {num_steps:5} {count:5}  {most:26} {speedup:7.2f}")
