"""Predicted gain of the paper's methods on an A100: bytes over bandwidth for a pass, and the
acceptance that the paper prints for how many of them a token takes, so that a curve is what its own
numbers imply (`minitri/core/roofline.py`, the autotuner).
"""

import functools
from collections.abc import Sequence

from minitri.apps.plan import SITES, config_of
from minitri.core.decoding.autotuner import Autotuner
from minitri.core.roofline import Workload
from minitri.core.settings import StepPlan
from tools.paper.item import PUBLISHED

_, _, TRIFORCE, _, NAIVE = PUBLISHED["table2"]["rows"][0]
RATES = {"draft": NAIVE, "retrieval": TRIFORCE}
"""Acceptance of the naive policy's guesses and of TriForce's at T = 0."""
A100 = SITES["a100-80"].machine
PAPER = StepPlan("triforce", 2, 6)
"""Gammas of the paper on an A100."""


def on_chip(num_tokens: int, budget: int = 4096, batch_size: int = 1) -> Workload:
    """The paper's models, after so many tokens in each row."""
    models = config_of("llama2-7b-128k"), config_of("llama-68m")
    return Workload(*models, batch_size * num_tokens, batch_size * budget, batch_size=batch_size)


def speedup(work: Workload, plans: Sequence[StepPlan]) -> float:
    """Speedup of the fastest of these plans over autoregressive decoding, on an A100."""
    tuner = Autotuner([*plans], functools.partial(work.seconds, A100), use_clock=False)
    for stage, rate in RATES.items():
        tuner.note_acceptance(stage, 10**9, round(10**9 * rate))
    return max(map(tuner.tokens_per_second, plans)) * work.seconds(A100, "target", 0)


def bound(rate: float) -> float:
    """The most that guesses of this acceptance can gain, if they cost nothing and a step makes ever
    more of them, while the target's pass takes all the time: 1 / (1 - rate) tokens a pass."""
    return 1 / (1 - rate)
