"""Greedy and seed-coupled texts equal those of autoregressive decoding, whatever the method and its
settings.

In float32 on a CPU, where a row computed in a block differs from the row alone in the last bits
only, this is equality of tokens, over thousands of them.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

import minitri
from minitri import End, GenerationConfig, SamplingParams, SpeculationConfig
from minitri.memory import MemoryShape
from minitri.model.execution import Execution
from minitri.stack import may_use_clock
from tests.conftest import write_hf_folder
from tools.paper.baselines.policies import policy_of

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


GRID = [
    {
        "method": method,
        "policy": policy_of(policy),
        "gamma1": gamma1,
        "gamma2": gamma2,
        "budget": budget,
        "chunk_size": chunk,
        "num_recent_tokens": recent,
        "rebuild_stride": stride,
        "rebuild_threshold": threshold,
    }
    for method, policy, (
        gamma1,
        gamma2,
        budget,
        chunk,
        recent,
        stride,
        threshold,
    ) in itertools.product(
        ("naive", "retrieval", "triforce"),
        ("retrieval", "streaming", "topk", "h2o"),
        (
            (1, 1, 8, 8, 1, 1, 0.0),
            (2, 6, 32, 8, 20, 256, 0.0),
            (3, 2, 16, 1, 8, 7, 0.9),
            (5, 9, 128, 4, 200, 256, 0.0),
        ),
    )
    if method != "naive" or policy == "retrieval"
]


@pytest.mark.parametrize("distribution", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize(
    "drafter", ["ngram", "other model", pytest.param("the target itself", marks=pytest.mark.slow)]
)
def test_every_setting_gives_the_autoregressive_text(engine, other_engine, drafter, distribution):
    draft = {"ngram": None, "other model": other_engine.model, "the target itself": engine.model}[
        drafter
    ]
    wanted, _ = texts(engine, None, distribution)
    accepted = rejected = rebuilds = 0
    for settings in GRID:
        if settings["method"] == "retrieval" and draft is not None:
            continue
        got, stats = texts(engine, draft, distribution, **settings)
        assert got == wanted, settings
        accepted += sum(level.num_accepted_tokens for level in stats.levels)
        rejected += sum(
            level.num_tested_tokens - level.num_accepted_tokens for level in stats.levels
        )
        rebuilds += stats.num_rebuilds
    assert (
        min(accepted, rejected, rebuilds) > 50
    )  # so the grid went through acceptance, rejection and rebuilding


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


def test_two_prompts_through_one_engine_equal_two_fresh_engines(engine, other_engine, folder):
    distribution = (SamplingParams(0.9), False)
    settings = {"method": "triforce", "budget": 24, "num_recent_tokens": 12}
    for prompt in (PROMPTS[1], PROMPTS[3]):
        used, _ = texts(engine, other_engine.model, distribution, prompts=[prompt], **settings)
        fresh = minitri.load(str(folder), dtype="float32", device="cpu")
        assert (
            texts(fresh, other_engine.model, distribution, prompts=[prompt], **settings)[0] == used
        )


@pytest.mark.parametrize("distribution", [(SamplingParams(1.0), False), COUPLED])
def test_a_seed_gives_the_same_text_twice_and_another_seed_another(
    engine, other_engine, distribution
):
    once, again, other = (
        texts(engine, other_engine.model, distribution, seed=seed, method="triforce", budget=24)[0]
        for seed in (3, 3, 4)
    )
    assert once == again != other


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
