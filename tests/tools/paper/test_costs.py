"""What is arithmetic in the paper's figures, against its own numbers and plain formulas."""

import pytest

from minitri.core.decoding.autotuner import expected_tokens
from tools.paper.costs import A100, PAPER, RATES, bound, on_chip, speedup
from tools.paper.items.offloading import CPU_BYTES_PER_SECOND, TOKENS, predicted
from tools.paper.items.offloading import PAPER as OFFLOADED
from tools.paper.items.trees import gpu_speedup, plans

ENDLESS = 1 << 40
"""Tokens after which nothing counts but passes of the target over the full cache."""


def test_the_papers_bound_is_that_of_guesses_that_cost_nothing():
    """13.1, 7 times that of the naive policy: tokens a pass of the target at the rates of table 2,
    without limit to a block."""
    most = bound(RATES["retrieval"])
    assert f"{most:.1f}, {most / bound(RATES['draft']):.0f}" == "13.1, 7"
    assert most == pytest.approx(expected_tokens(RATES["retrieval"], 10_000))


def test_the_papers_speedup_on_an_a100_follows_from_its_acceptance():
    """2.31 after 122,880 tokens; bytes over bandwidth know nothing of Python's time, so more."""
    assert 2.31 < speedup(on_chip(122_880), [PAPER]) < 4


def test_the_ledgers_times_are_those_of_bytes_over_the_link():
    """Two cards, each with half of the KV of the layers that do not fit, 25.6 GB/s apart."""
    [(flags, *_), *_] = OFFLOADED.values()
    times = predicted(flags)
    layer_bytes = TOKENS * 2 * 2 * 4096
    seconds = (32 - times["on_chip"]) * layer_bytes / 2 / 25.6e9
    assert times["alone_ms"] == pytest.approx(1e3 * seconds, rel=0.01)
    assert times["on_cpu_ms"] > 1e3 * 32 * layer_bytes / CPU_BYTES_PER_SECOND


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
