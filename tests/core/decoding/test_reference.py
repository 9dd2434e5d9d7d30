"""The cascade says what Algorithm 1 says, token for token, given the same random numbers."""

import random

import pytest
import torch

from minitri.core.decoding.random_source import IndependentSource
from minitri.core.decoding.reference import triforce
from minitri.core.settings import StepPlan
from tests.core.exactness import PROMPT, Table, toy_cascade


@pytest.mark.parametrize("seed", range(8))
def test_the_cascade_equals_algorithm_1(seed):
    rng = random.Random(seed)
    V, gamma1, gamma2 = rng.randint(2, 7), rng.randint(1, 4), rng.randint(1, 6)
    target = Table(V, seed)
    retrieval, draft = (Table(V, seed + n, near=target) for n in (1, 2))
    source = IndependentSource("token")
    source.restart(0, seed)
    plan = StepPlan("triforce", gamma1, gamma2)
    cascade = toy_cascade(source, 1, (target, retrieval, draft), [plan])
    cascade.start([0])
    while len(cascade.sequences[0]) < len(PROMPT) + 20:
        cascade.step()
    generator = torch.Generator().manual_seed(seed)
    numbers = iter(torch.rand(10_000, dtype=torch.float64, generator=generator).tolist())
    models = [
        lambda text, table=table: table.row(tuple(text)).tolist()
        for table in (draft, retrieval, target)
    ]
    gammas = {"gamma1": gamma1, "gamma2": gamma2}
    said = triforce([*PROMPT], 20, *models, **gammas, uniform=numbers.__next__)
    assert cascade.sequences[0] == [*PROMPT, *said]
