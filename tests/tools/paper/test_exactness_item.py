"""The published rule's distribution, by formula: against every outcome, and against toys whose
texts are all enumerated."""

import pytest
import torch

from tools.paper.items import exactness
from tools.paper.items.exactness import RULES, Toy, next_token, residual, toy_distance

V = 4


def three_rows(seed: int) -> list[torch.Tensor]:
    """Distributions of drafter, middle and target, (V,) each; some probabilities are 0."""
    generator = torch.Generator().manual_seed(seed)
    rows_NV = torch.rand(3, V, generator=generator, dtype=torch.float64) - 0.25
    rows_NV = rows_NV.clamp_min(0) + 1e-3 * torch.eye(V, dtype=torch.float64)[seed % V]
    return [*(rows_NV / rows_NV.sum(1, keepdim=True))]


def verified(proposed_V, verifier_V, correction_V) -> torch.Tensor:
    """Distribution after a verdict on a token drawn from the first: every outcome added up."""
    probs_V = torch.zeros(V, dtype=torch.float64)
    for token, proposed in enumerate(proposed_V.tolist()):
        passes = min(1.0, float(verifier_V[token]) / proposed) if proposed > 0 else 0.0
        probs_V[token] += proposed * passes
        probs_V += proposed * (1 - passes) * correction_V
    return probs_V


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(6))
def test_the_formula_adds_up_every_outcome(seed, rule):
    """A draft, a verdict, a correction by the rule; and the target's verdict on what that gives,
    as if it had been drawn from the middle level's own distribution."""
    q_V, phat_V, p_V = three_rows(seed)
    middle_V = verified(q_V, phat_V, phat_V if rule == "published" else residual(phat_V, q_V))
    wanted_V = torch.zeros(V, dtype=torch.float64)
    for token, weight in enumerate(middle_V.tolist()):
        passes = min(1.0, float(p_V[token] / phat_V[token])) if phat_V[token] > 0 else 0.0
        wanted_V[token] += weight * passes
        wanted_V += weight * (1 - passes) * residual(p_V, phat_V)
    [summed_V] = next_token(q_V[None], phat_V[None], p_V[None], rule)
    assert summed_V.tolist() == pytest.approx(wanted_V.tolist(), abs=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.2])
def test_only_with_the_residual_do_toys_write_what_their_targets_would(temperature):
    assert toy_distance(0, temperature, is_exact=True) < 1e-12
    published = toy_distance(0, temperature, is_exact=False)
    assert published == 0 if temperature == 0 else published > 1e-5


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_toys_first_token_follows_the_formula(is_exact):
    made = Toy(1, 0.6)
    firsts = exactness.Texts()
    for tokens, weight in made.texts(is_exact).items():
        firsts[tokens[:1]] += weight
    levels = (exactness.DRAFT, exactness.MIDDLE, exactness.TARGET)
    rows = (made.probs(level, ())[None] for level in levels)
    [wanted_V] = next_token(*rows, "ours" if is_exact else "published")
    assert [firsts[(token,)] for token in range(V)] == pytest.approx(wanted_V.tolist(), abs=1e-12)
    assert sum(firsts.values()) == pytest.approx(1, abs=1e-12)
