"""The court of acceptance rules: what is lossless, and what is not."""

from tools.paper.court import LOSSLESS, RULES
from tools.paper.items.court import toy_distances


def test_lossless_rules_are_within_rounding_and_each_other_is_far_off_somewhere():
    """Temperature 0 is left out: there most of them say the argmax."""
    found = [toy_distances(temperature) for temperature in (0.6, 1.2)]
    for name in RULES:
        worst = max(distances[name] for distances in found)
        assert worst < 1e-12 if name in LOSSLESS else worst > 1e-2, name
