"""The cascade says what Algorithm 1 says, token for token, given the same random numbers."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitri.core.decoding.random_source import IndependentSource
from minitri.core.decoding.reference import triforce
from minitri.core.decoding.sampling import probs_from_logits
from minitri.core.settings import SamplingParams
from tests.core.exactness import PROMPT, Table, plan_of, toy_cascade

FILTERS = (SamplingParams(1.0), SamplingParams(0.6), SamplingParams(0.9, top_k=3, top_p=0.8))


class Filtered(Table):
    """A table under temperature and filters."""

    def __init__(self, V: int, seed: int, sampling: SamplingParams, near: Table | None = None):
        super().__init__(V, seed, near=near)
        unfiltered = self.row
        self.row = lambda context: probs_from_logits(unfiltered(context).log()[None], sampling)[0]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    V=st.integers(2, 7),
    gamma1=st.integers(1, 4),
    gamma2=st.integers(1, 6),
    sampling=st.sampled_from(FILTERS),
)
def test_the_cascade_equals_algorithm_1(seed, V, gamma1, gamma2, sampling):
    target = Filtered(V, seed, sampling)
    retrieval = Filtered(V, seed + 1, sampling, near=Table(V, seed))
    draft = Filtered(V, seed + 2, sampling, near=Table(V, seed))
    source = IndependentSource("token")
    source.restart(0, seed)
    tables = target, retrieval, draft
    cascade = toy_cascade(source, 1, tables, [plan_of(gamma1, gamma2)])
    cascade.start([0])
    while len(cascade.sequences[0]) < len(PROMPT) + 20:
        cascade.step()
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(10_000, dtype=torch.float64, generator=generator).tolist()
    models = [
        lambda text, table=table: table.row(tuple(text)).tolist()
        for table in (draft, retrieval, target)
    ]
    said = triforce(
        list(PROMPT), 20, *models, gamma1=gamma1, gamma2=gamma2, uniform=iter(numbers).__next__
    )
    assert cascade.sequences[0] == [*PROMPT, *said]
