"""Items of the paper: cells where the answer is known, and figures that follow from formulas."""

import pytest

from tools.paper.costs import PAPER, RATES, bound, on_chip, speedup
from tools.paper.items.exactness import toy_distance
from tools.paper.items.offloading import PAPER as OFFLOADED
from tools.paper.items.offloading import predicted
from tools.paper.lab import Lab
from tools.paper.scale import SCALES
from tools.paper.texts import Text

TINY = SCALES["tiny"]


def test_a_datastore_never_holds_the_prompt_nor_what_follows_it(engine):
    """A datastore that did would guess what was memorised; prompts may be later parts of a text."""
    texts = [Text("a", "abc " * 200), Text("b", "xyz " * 200)]
    [others] = Lab(TINY, texts).other_texts(2, engine)  # the first, a later part
    assert engine.tokenizer.decode(others).split() == ["xyz"] * 200
    words = " ".join(map(str, range(1000)))
    lab, ids = Lab(TINY, [Text("a", words)]), engine.tokenizer.encode(words)
    for part in (0, 1):
        [rest] = lab.other_texts(part, engine)
        start = part * TINY.context
        assert lab.prompt(part, TINY.context, engine) == ids[start : start + TINY.context]
        assert rest == ids[:start] + ids[start + TINY.context + 2 * TINY.new_tokens :]


def test_the_papers_bound_is_that_of_guesses_that_cost_nothing():
    """13.1, 7 times that of the naive policy."""
    most = bound(RATES["retrieval"])
    assert f"{most:.1f}, {most / bound(RATES['draft']):.0f}" == "13.1, 7"


def test_the_papers_times_follow_from_bytes_and_its_acceptance():
    """An A100 was 2.31 times as fast: bytes over bandwidth know nothing of Python's time, so more.
    With offloading its milliseconds a token, where it says them."""
    assert 2.31 < speedup(on_chip(122_880), [PAPER]) < 4
    for flags, ms, _, _ in OFFLOADED.values():
        assert ms == 0 or predicted(flags)["ms"] == pytest.approx(ms, rel=0.1)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.2])
def test_only_with_the_residual_do_toys_write_what_their_targets_would(temperature):
    assert toy_distance(0, temperature, is_exact=True) < 1e-12
    published = toy_distance(0, temperature, is_exact=False)
    assert published == 0 if temperature == 0 else published > 1e-5
