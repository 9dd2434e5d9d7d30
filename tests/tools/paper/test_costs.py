"""Arithmetic of the paper's figures, against its own numbers."""

import pytest

from tools.paper.costs import PAPER, RATES, bound, on_chip, speedup
from tools.paper.items.offloading import PAPER as OFFLOADED
from tools.paper.items.offloading import predicted


def test_the_papers_bound_is_that_of_guesses_that_cost_nothing():
    """13.1, 7 times that of the naive policy."""
    most = bound(RATES["retrieval"])
    assert f"{most:.1f}, {most / bound(RATES['draft']):.0f}" == "13.1, 7"


def test_the_papers_times_follow_from_bytes_and_its_acceptance():
    """On an A100 2.31 times as fast: bytes over bandwidth know nothing of Python's time, so more.
    With offloading its milliseconds a token, where it says them."""
    assert 2.31 < speedup(on_chip(122_880), [PAPER]) < 4
    for flags, ms, _, _ in OFFLOADED.values():
        assert ms == 0 or predicted(flags)["ms"] == pytest.approx(ms, rel=0.1)
