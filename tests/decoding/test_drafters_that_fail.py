"""A drafter whose logits are not finite is switched off, and the text stays exact.

Whether it fails may depend on what it has just guessed. So its guesses up to there must be kept as
a shorter proposal: throwing them away would bend the distribution.
"""

from __future__ import annotations

import math

import pytest
import torch

from minitri import End, GenerationConfig, InputError, SamplingParams, SpeculationConfig, Token
from minitri.decoding.verification import Proposal, verify, verify_block
from tests.cascades import tiny_engine
from tests.exactness import (
    PROMPT,
    ScriptedSource,
    Table,
    add_up,
    target_distribution,
    toy_cascade,
)


class FailingTable(Table):
    """Gives NaN behind every context that ends in token 0 and is longer than the prompt."""

    def _row(self, context):
        row = super()._row(context)
        return row * math.nan if len(context) > len(PROMPT) and context[-1] == 0 else row


class CheckedSource(ScriptedSource):
    """Of damaged proposals those guesses count that came before the damage."""

    def sample(self, probs_BV, starts, active):
        if not probs_BV.isfinite().all():
            return torch.zeros(len(active), dtype=torch.int64)
        return super().sample(probs_BV, starts, active)

    def note(self, proposal, probs_BNV, active):
        [num_finite] = proposal.probs_BNV.sum(2).isfinite().cumprod(1).sum(1).tolist()
        counted = [proposal.tokens[0][:num_finite]]
        super().note(Proposal.of(counted, proposal.probs_BNV, [[]]), probs_BNV, active)


@pytest.mark.parametrize("middle", [False, True])
def test_guesses_made_before_a_failure_count(middle):
    """All random numbers of a step of a cascade whose drafter fails behind some guesses."""
    target, horizon, num_failures = Table(3, 0), 3, 0
    tables = Table(3, 1, near=target) if middle else None, FailingTable(3, 2, near=target)
    total = torch.zeros((3,) * horizon, dtype=torch.float64)
    paths = [(1.0, [])]
    while paths:  # one by one: a failure ends the drafting of a whole batch
        weight, script = paths.pop()
        source = CheckedSource([script])
        cascade = toy_cascade(source, 1, target, *tables, 2, 2)
        failures = []
        cascade._drafter._on_not_finite = lambda failures=failures: failures.append(1)
        cascade.step()
        num_failures += len(failures)
        if 0 in source.frontier:
            paths += [(weight * share, [*script, more]) for share, more in source.frontier[0]]
        else:
            add_up(total, tuple(cascade.sequences[0][len(PROMPT) :]), weight, target, horizon)
    assert num_failures >= 2
    assert float((total - target_distribution(target, horizon)).abs().max()) < 1e-12


@pytest.mark.parametrize("method", ["naive", "triforce"])
@pytest.mark.parametrize("coupled", [False, True])
def test_a_damaged_drafter_is_switched_off_with_one_warning(method, coupled, caplog):
    engine = tiny_engine()
    plain = GenerationConfig(40, ignore_eos=True)
    settings = {"generation": plain, "seed": 3}
    if coupled:
        settings["sampling"] = SamplingParams(0.9, top_p=0.95)
    speculation = SpeculationConfig(
        method, budget=32, num_recent_tokens=20, coupled=coupled, gamma1=2, gamma2=3
    )
    alone = SpeculationConfig("autoregressive", coupled=coupled)
    prompts = [[5, 6, 7, 8] * 10, [9, 10, 11]]
    wanted, got = (
        {
            event.row: event.token_ids
            for event in engine.generate(prompts, speculation=how, **settings)
            if isinstance(event, End)
        }
        for how in (alone, speculation)
    )
    assert got == wanted
    assert not caplog.records
    engine.draft.norm.weight[0] = torch.nan
    events = list(engine.generate(prompts, speculation=speculation, **settings))
    assert {e.row: e.token_ids for e in events if isinstance(e, End)} == wanted
    assert "draft" not in {event.origin for event in events if isinstance(event, Token)}
    [record] = caplog.records
    assert "the drafter llama computes logits that are not finite" in record.getMessage()


@pytest.mark.parametrize("method", ["autoregressive", "retrieval", "triforce"])
def test_a_damaged_target_stops_the_run_and_is_named(method):
    engine = tiny_engine()
    engine.model.norm.weight[0] = torch.nan
    speculation = SpeculationConfig(method, budget=32, num_recent_tokens=20)
    with pytest.raises(InputError, match="llama computed logits that are not finite") as error:
        engine.complete([5, 6, 7], speculation=speculation)
    assert "get them again" in str(error.value)
    assert "float32;" in str(error.value)
    assert "--dtype" not in str(error.value)


@pytest.mark.parametrize("decide", [verify, verify_block])
def test_a_finite_distribution_behind_a_failure(decide):
    """Only the guess in front of it counts: it is decided about as if it stood alone."""
    q_BNV = torch.tensor([[[1.0, 0, 0], [math.nan] * 3, [0, 0, 1.0]]]).double()
    p_BNV = torch.tensor([[[0.5, 0.5, 0], [0, 1.0, 0], [0, 0, 1.0], [0, 0, 1.0]]]).double()
    proposal = Proposal.of([[0, 0, 2]], q_BNV, [["draft"] * 3])
    for number, outcome in ((0.49, ([1], [1])), (0.51, ([0], [1]))):
        uniforms_BN = torch.tensor([[number, 0, 0, 0.5]]).double()
        verdict = decide(proposal, p_BNV, uniforms_BN)
        assert (verdict.num_accepted, verdict.next_tokens) == outcome
        assert verdict.is_damaged
