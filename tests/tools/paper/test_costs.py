"""What is arithmetic in the paper's figures, against its own numbers and plain formulas."""

import pytest

from minitri.core.decoding.autotuner import expected_tokens
from minitri.core.settings import StepPlan
from tools.paper.costs import A100, PAPER, RATES, bound, on_chip, speedup
from tools.paper.items.batches import BATCHES, WORTH, cells, pays_from
from tools.paper.items.batches import predicted as batch_speedup
from tools.paper.items.offloading import CPU_BYTES_PER_SECOND, TOKENS, predicted
from tools.paper.items.offloading import PAPER as OFFLOADED
from tools.paper.items.speeds import OPEN
from tools.paper.items.trees import gpu_speedup, plans
from tools.paper.scale import SCALES

ENDLESS = 1 << 40
"""Tokens after which nothing counts but passes of the target over the full cache."""


def test_the_papers_bound_is_that_of_guesses_that_cost_nothing():
    """13.1, 7 times that of the naive policy: tokens a pass of the target at the rates of table 2,
    without limit to a block."""
    rates = RATES["retrieval"], RATES["draft"]
    assert f"{bound(rates[0]):.1f}" == "13.1"
    assert f"{bound(rates[0]) / bound(rates[1]):.0f}" == "7"
    assert bound(rates[0]) == pytest.approx(expected_tokens(rates[0], 10_000))


def test_gains_grow_with_the_context_up_to_the_tokens_of_a_step():
    lengths = [*(1 << n for n in range(13, 24)), ENDLESS]
    gains = [speedup(on_chip(num_tokens), OPEN) for num_tokens in lengths]
    assert gains == sorted(gains)
    assert gains[-1] < bound(RATES["retrieval"])
    [naive] = [speedup(on_chip(ENDLESS), [StepPlan("naive", 5)])]
    assert naive == pytest.approx(expected_tokens(RATES["draft"], 5), rel=1e-4)


def test_the_papers_speedup_on_an_a100_follows_from_its_acceptance():
    """2.31 after 122,880 tokens; bytes over bandwidth know nothing of Python's time, so more."""
    assert 2.31 < speedup(on_chip(122_880), [PAPER]) < 4


def test_a_batch_gains_as_one_text_of_all_its_tokens_but_for_arithmetic():
    """Where memory bounds both; with enough rows the GPU computes, and guesses cost."""
    whole = speedup(on_chip(120_000, 4096), [PAPER])
    assert speedup(on_chip(60_000, 2048, 2), [PAPER]) == pytest.approx(whole, rel=0.02)
    assert speedup(on_chip(600, 200, 512), [PAPER]) < 1


def test_batches_pay_from_the_first_power_of_two_that_gains():
    for rows, _, budget in BATCHES:
        length = pays_from(rows, budget)
        assert batch_speedup(rows, length, budget) > WORTH
        assert length > 256
        assert batch_speedup(rows, length // 2, budget) <= WORTH


def test_batches_on_a_gpu_are_the_papers():
    found = [(it["rows"], it["length"], it["budget"]) for it in cells(SCALES["gpu"])]
    wanted = [(rows, 1024 * thousands, budget) for rows, thousands, budget in BATCHES]
    assert found[::2] == found[1::2] == wanted


def test_the_ledgers_times_are_those_of_bytes_over_the_link():
    """Two cards, each with half of the KV of the layers that do not fit, 25.6 GB/s apart."""
    [(flags, *_), *_] = OFFLOADED.values()
    found = predicted(flags)
    layer_bytes = TOKENS * 2 * 2 * 4096
    seconds = (32 - found["on_chip"]) * layer_bytes / 2 / 25.6e9
    assert found["alone_ms"] == pytest.approx(1e3 * seconds, rel=0.01)
    assert found["on_cpu_ms"] > 1e3 * 32 * layer_bytes / CPU_BYTES_PER_SECOND


def test_the_ledger_gives_the_papers_times_offloaded():
    for flags, ms, _, _ in OFFLOADED.values():
        assert ms == 0 or predicted(flags)["ms"] == pytest.approx(ms, rel=0.1)


def test_a_chain_takes_a_pass_of_the_drafter_for_each_guess():
    """And a tree never takes less."""
    named = plans("naive")
    work = on_chip(122_880)
    target, draft = (work.seconds(A100, stage, 0) for stage in ("target", "draft"))
    chain = gpu_speedup(named["chain"], 2.0)
    assert chain == pytest.approx(2 * target / (4 * draft + target), rel=1e-6)
    assert all(gpu_speedup(plan, 2.0) <= chain for plan in named.values())
