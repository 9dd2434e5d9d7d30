"""Items of the paper: cells where the answer is known, and figures that follow from formulas;
the court of acceptance rules: what is lossless, what is not, and the formulas of both."""

import pytest
import torch

from tools.paper.costs import PAPER, RATES, bound, on_chip, speedup
from tools.paper.court import LOSSLESS, RULES, outcomes, step
from tools.paper.items.court import next_token, toy_distances
from tools.paper.items.exactness import DRAFT, TARGET, Toy, toy_distance
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


def test_lossless_rules_are_within_rounding_and_each_other_is_far_off_somewhere():
    """Temperature 0 is left out: there most of them say the argmax."""
    found = [toy_distances(temperature) for temperature in (0.6, 1.2)]
    for name in RULES:
        worst = max(distances[name] for distances in found)
        assert worst < 1e-12 if name in LOSSLESS else worst > 1e-2, name


@pytest.mark.parametrize("name", RULES)
def test_the_formulas_of_one_guess_are_what_every_outcome_adds_up_to(name):
    toy = Toy(3, 0.9)
    q_V, p_V = (toy.probs(level, ()) for level in (DRAFT, TARGET))
    draft, target = (lambda _, probs_V=probs_V: probs_V.tolist() for probs_V in (q_V, p_V))
    added_V = torch.zeros_like(p_V)
    texts = outcomes(lambda uniform: step(RULES[name], draft, target, uniform, gamma=1))
    for (token, *_), weight in texts.items():
        added_V[token] += weight
    [by_formula_V] = next_token(name, q_V[None], p_V[None])
    torch.testing.assert_close(by_formula_V, added_V, atol=1e-12, rtol=0)
