"""The ledger by hand: each line follows from a model's shape and the constants that are stated."""

from __future__ import annotations

import dataclasses
import json

import pytest

from minitri import plan
from minitri.benchmarks.ledger import CARDS, LAUNCHES, VERDICT_LAUNCHES, Workload, predict, table
from minitri.loading.named_models import shape_of
from minitri.roofline import eight_bit_bytes
from minitri.settings import StepPlan

SEVEN_B = Workload(shape_of("llama2-7b-128k"), shape_of("llama-68m"), 32, 122_880, 4096)
TRIFORCE, RATES = StepPlan("triforce", 2, 6), (0.46, 0.92)
CARD = CARDS[80]


def phases_of(work: Workload = SEVEN_B, step: StepPlan = TRIFORCE):
    return {phase.stage: phase for phase in work.phases(step, RATES)[0]}


def test_a_pass_of_the_target_by_hand():
    """6.607 billion numbers of weights per pass, 512 KiB of KV per token, 660 launches."""
    target = phases_of(step=StepPlan("autoregressive"))["target"]
    assert target.weight_bytes == 2 * (6_738_415_616 - 32_000 * 4096)
    assert target.kv_bytes == 122_880 * 512 * 1024
    assert target.flops == target.weight_bytes + 4 * 4096 * 32 * 122_880
    around, each = LAUNCHES["fused"]
    assert (target.launches, target.eager_launches) == (around + 32 * each, VERDICT_LAUNCHES)
    bytes_ms = 1e3 * (target.weight_bytes + target.kv_bytes) / 2e12
    assert target.ms(CARD) == pytest.approx(bytes_ms + 1.6e-3 * (340 + 69) + 0.06)


def test_a_step_is_the_sum_of_its_phases():
    phases, num_tokens = SEVEN_B.phases(TRIFORCE, RATES)
    ms = predict(SEVEN_B, CARD, TRIFORCE, RATES)
    step = sum(phase.per_step * phase.ms(CARD) for phase in phases)
    assert ms["cascade"] == pytest.approx(step / num_tokens)
    by_stage = {phase.stage: phase for phase in phases}
    assert by_stage["draft"].per_step == pytest.approx(2 * by_stage["retrieval"].per_step)
    assert [phase.round_trips for phase in phases] == [0, 1, 1, 0]


def test_kv_in_host_memory_travels_and_is_not_captured():
    half = phases_of(dataclasses.replace(SEVEN_B, on_chip=16))["target"]
    assert half.link_bytes == half.kv_bytes / 2
    assert half.launches == 0
    assert half.ms(CARD) == pytest.approx(1e3 * half.link_bytes / 25e9 + 0.06)


def test_a_copy_in_8_bits_halves_the_retrieval_pass_and_nothing_else():
    plain, copied = phases_of(), phases_of(dataclasses.replace(SEVEN_B, has_copy=True))
    assert copied["retrieval"].weight_bytes == eight_bit_bytes(SEVEN_B.config)
    assert copied["retrieval"].weight_bytes < 0.51 * plain["retrieval"].weight_bytes
    assert all(copied[name] == plain[name] for name in ("draft", "target", "commit"))


def test_two_gpus_read_half_and_add_up_twice_a_layer():
    one, two = phases_of(), phases_of(dataclasses.replace(SEVEN_B, num_gpus=2))
    for stage in ("retrieval", "target"):
        assert two[stage].kv_bytes == one[stage].kv_bytes / 2
        assert two[stage].weight_bytes == pytest.approx(one[stage].weight_bytes / 2, rel=1e-3)
        assert (one[stage].sums, two[stage].sums) == (0, 2 * 32 + 2)
    assert two["draft"] == one["draft"]
    # Each of two ranks sends half of every sum, twice, and its half of the logits.
    alone = phases_of(dataclasses.replace(SEVEN_B, num_gpus=2), StepPlan("autoregressive"))
    assert alone["target"].sent_bytes == 2 * (65 * 4096 + 16_000)


def test_the_table_shows_measured_times_where_there_are_any():
    phases, _ = SEVEN_B.phases(TRIFORCE, RATES)
    lines = table(phases, CARD, {"target": 41.25}).splitlines()
    assert lines[0].split()[-1] == "measured"
    assert lines[3].split()[-1] == "41.250"
    assert len(lines) == 5


def test_plan_explains_with_the_numbers_of_its_table(capsys):
    with pytest.raises(SystemExit):
        plan.main(["--context", "122880", "--gpu-memory", "141", "--gamma1", "2", "--gamma2", "6",
                   "--explain"])  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    ms = json.loads(lines[-1])["placements"][0]["predicted_ms"]
    shown = {line.split()[0]: line.split()[-1] for line in lines if "verification  " in line}
    assert shown["target"] == f"{ms['target']:.3f}"
    assert any(line.startswith("prefill chunk") for line in lines)
    assert any("seconds_per_launch=1.6e-06" in line for line in lines)
