"""Greedy and seed-coupled texts equal those of autoregressive decoding, whatever the method and its
settings.

In float32 on a CPU, where a row computed in a block differs from the row alone in the last bits
only, this is equality of tokens, over thousands of them.
"""

from types import SimpleNamespace

import pytest
import torch

import minitri
from minitri import End, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.memory import MemoryShape
from minitri.model.execution import Execution
from minitri.stack import may_use_clock
from tests.conftest import write_hf_folder

PROMPTS = [[5, 6, 7], list(range(10, 60)), [9], [4] * 20]
"""Ragged; one shorter than a chunk, one a single token, one all repetition, which n-grams love."""
NUM_NEW = 40
GREEDY = (SamplingParams(), False)
COUPLED = (SamplingParams(0.8, top_k=40, top_p=0.95), True)


@pytest.fixture(scope="module")
def other_engine(tmp_path_factory) -> minitri.Engine:
    """Another model with the same vocabulary: a drafter that is often wrong."""
    folder = write_hf_folder(
        tmp_path_factory.mktemp("drafts") / "draft", seed=3, num_hidden_layers=1
    )
    return minitri.load(str(folder), dtype="float32", device="cpu")


def texts(engine, draft, distribution, prompts=PROMPTS, num_new=NUM_NEW, seed=7, **settings):
    sampling, coupled = distribution
    run = minitri.Engine(engine.model, engine.tokenizer, draft).generate(
        prompts,
        sampling=sampling,
        generation=GenerationConfig(num_new, ignore_eos=True),
        speculation=SpeculationConfig(coupled=coupled, **settings),
        seed=seed,
    )
    ends = sorted((event for event in run if isinstance(event, End)), key=lambda end: end.row)
    return [end.token_ids for end in ends], ends[0].stats


@pytest.mark.parametrize("budget", [24, None])
def test_a_row_of_a_batch_gives_what_it_gives_alone_at_any_temperature(
    engine, other_engine, budget, monkeypatch
):
    """Without coupling, too: a row draws from its own stream, only when it takes part, and has its
    own budget."""
    monkeypatch.setattr(
        SpeculationConfig, "budget_for", lambda self, n, doublings=0: self.budget or 8 + n // 16 * 8
    )
    distribution = (SamplingParams(0.9, top_k=50), False)
    settings = {"method": "triforce", "gamma1": 2, "gamma2": 4, "budget": budget}
    together, _ = texts(engine, other_engine.model, distribution, seed=[7, 8, 9, 10], **settings)
    for b, prompt in enumerate(PROMPTS):
        alone, _ = texts(
            engine, other_engine.model, distribution, prompts=[prompt], seed=7 + b, **settings
        )
        assert alone == [together[b]]


def test_a_target_that_drafts_for_itself_is_always_right(engine):
    """Every stage sees everything, so every distribution is the target's: nothing may be rejected,
    at any temperature."""
    for distribution in (GREEDY, COUPLED, (SamplingParams(1.0), False)):
        _, stats = texts(
            engine,
            engine.model,
            distribution,
            method="triforce",
            budget=128,
            num_recent_tokens=200,
            gamma1=3,
        )
        assert [level.acceptance_rate for level in stats.levels] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("dtype", "device", "is_row_invariant", "distribution", "timed", "may"),
    [
        (torch.float32, "cpu", False, GREEDY, False, True),
        (torch.float32, "cpu", False, COUPLED, False, True),
        (torch.float32, "cpu", True, (SamplingParams(0.8), False), False, False),
        (torch.bfloat16, "cpu", False, GREEDY, False, False),
        (torch.bfloat16, "cpu", True, GREEDY, False, True),
        (torch.float32, "cuda", False, COUPLED, False, False),
        (torch.bfloat16, "cuda", False, (SamplingParams(0.8), False), True, True),
    ],
)
def test_a_clock_chooses_plans_only_where_the_text_cannot_depend_on_them(
    dtype, device, is_row_invariant, distribution, timed, may
):
    sampling, coupled = distribution
    speculation = SpeculationConfig("auto", coupled=coupled, timed=timed)
    shape = MemoryShape((1,), sampling, GenerationConfig(4), speculation)
    execution = Execution(is_row_invariant=is_row_invariant)
    target = SimpleNamespace(dtype=dtype, device=torch.device(device), execution=execution)
    assert may_use_clock(SimpleNamespace(target=target), shape) == may
