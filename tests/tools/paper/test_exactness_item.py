"""The published rule's distribution, by formula: against every outcome, against samples by the
code's own `verify`, and against toys whose texts are all enumerated."""

import pytest
import torch

from minitri.core.decoding.sampling import sample
from minitri.core.decoding.verification import Guesses, verify
from tools.paper.item import Done
from tools.paper.items import exactness
from tools.paper.items.exactness import RULES, Toy, next_token, residual, toy_distance
from tools.paper.scale import SCALES

V = 4


def three_rows(seed: int) -> list[torch.Tensor]:
    """Distributions of drafter, middle and target, (V,) each; some probabilities are 0."""
    generator = torch.Generator().manual_seed(seed)
    rows_NV = torch.rand(3, V, generator=generator, dtype=torch.float64) - 0.25
    rows_NV = rows_NV.clamp_min(0) + 1e-3 * torch.eye(V, dtype=torch.float64)[seed % V]
    return [*(rows_NV / rows_NV.sum(1, keepdim=True))]


def by_outcomes(q, phat, p, rule: str) -> torch.Tensor:
    """The definition: a draft, a verdict, a correction, a verdict, a correction."""
    correction_V = phat if rule == "published" else residual(phat, q)
    middle_V, probs_V = torch.zeros(2, V, dtype=torch.float64)
    for drafted in range(V):
        passes = min(1.0, float(phat[drafted] / q[drafted])) if q[drafted] > 0 else 0.0
        middle_V[drafted] += q[drafted] * passes
        for corrected in range(V):
            middle_V[corrected] += q[drafted] * (1 - passes) * correction_V[corrected]
    for token in range(V):
        passes = min(1.0, float(p[token] / phat[token])) if phat[token] > 0 else 0.0
        probs_V[token] += middle_V[token] * passes
        for recovered in range(V):
            probs_V[recovered] += middle_V[token] * (1 - passes) * residual(p, phat)[recovered]
    return probs_V


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(12))
def test_the_formula_adds_up_every_outcome(seed, rule):
    q, phat, p = three_rows(seed)
    [found_V] = next_token(q[None], phat[None], p[None], rule)
    assert found_V == pytest.approx(by_outcomes(q, phat, p, rule), abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_the_formula_is_what_the_codes_own_verification_samples(rule):
    """200,000 seeded tokens; none is 5 standard errors off."""
    B = 200_000
    q, phat, p = three_rows(3)
    numbers_BN = torch.rand(B, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one_B = torch.ones(B, dtype=torch.int64)

    def decide(proposer_V, verifier_V, tokens_B, uniforms_BN):
        guesses = Guesses(tokens_B[:, None], proposer_V.expand(B, 1, V), one_B)
        verdict = verify(verifier_V.expand(B, 2, V), uniforms_BN, guesses)
        return verdict.num_accepted_B == 1, verdict.next_B

    drafted_B = sample(q.expand(B, V), numbers_BN[:, 0])
    is_kept_B, corrected_B = decide(q, phat, drafted_B, numbers_BN[:, 1:3])
    if rule == "published":
        corrected_B = sample(phat.expand(B, V), numbers_BN[:, 2])
    middle_B = torch.where(is_kept_B, drafted_B, corrected_B)
    is_kept_B, recovered_B = decide(phat, p, middle_B, numbers_BN[:, 3:5])
    tokens_B = torch.where(is_kept_B, middle_B, recovered_B)
    [wanted_V] = next_token(q[None], phat[None], p[None], rule)
    errors_V = (wanted_V * (1 - wanted_V) / B).sqrt()
    shares_V = tokens_B.bincount(minlength=V) / B
    assert ((shares_V - wanted_V).abs() <= 5 * errors_V + 1e-12).all()
    other = next_token(q[None], phat[None], p[None], RULES[rule == RULES[0]])
    assert ((shares_V - other[0]).abs() > 10 * errors_V).any()  # it tells the rules apart


@pytest.mark.parametrize("temperature", [0.0, 0.2, 0.6, 1.0, 1.2])
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


def test_total_variation_is_the_mass_that_moved():
    a, b = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.5, 0.25]])
    assert exactness.total_variation(a, b).tolist() == [0.25]
    assert exactness.total_variation(a, a).tolist() == [0.0]


@pytest.mark.parametrize(("distance", "said"), [(0.2, "does not keep"), (1e-12, "keeps")])
def test_a_rule_is_said_to_keep_the_distribution_only_if_it_does(distance, said):
    scale = SCALES["tiny"]
    values = {"published": [distance], "ours": [1e-15]}
    done = [Done(it, values) for it in exactness.cells(scale)]
    assert f"The published rule {said} the" in exactness.show(done, scale).verdict
