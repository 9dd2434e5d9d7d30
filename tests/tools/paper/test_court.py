"""The court of acceptance rules: what is lossless, what is not, and the formulas of both."""

import pytest
import torch

from tools.paper.court import LOSSLESS, RULES, outcomes, step
from tools.paper.items.court import next_token, toy_distances
from tools.paper.items.exactness import DRAFT, TARGET, Toy


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
