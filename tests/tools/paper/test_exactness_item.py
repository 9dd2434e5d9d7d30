"""The published rule's distribution, by formula, for single tokens and for toys whose texts are all
enumerated."""

import pytest
import torch

from tools.paper.items.exactness import next_token, toy_distance


@pytest.mark.parametrize("seed", range(6))
def test_a_token_follows_the_target_with_the_residual_and_the_published_formula_without(seed):
    generator = torch.Generator().manual_seed(seed)
    rows_3V = torch.rand(3, 4, generator=generator, dtype=torch.float64) - 0.25
    rows_3V = rows_3V.clamp_min(0) + 1e-3 * torch.eye(4, dtype=torch.float64)[seed % 4]
    q_1V, phat_1V, p_1V = (rows_3V / rows_3V.sum(1, keepdim=True)).split(1)
    torch.testing.assert_close(next_token(q_1V, phat_1V, p_1V, "ours"), p_1V)
    common_1V, left_1V = torch.minimum(q_1V, phat_1V), (p_1V - phat_1V).clamp_min(0)
    middle_1V = common_1V + (1 - common_1V.sum()) * phat_1V
    accepted_1V = middle_1V * (p_1V / phat_1V).nan_to_num(0).clamp_max(1)
    wanted_1V = accepted_1V + (1 - accepted_1V.sum()) * left_1V / left_1V.sum()
    torch.testing.assert_close(next_token(q_1V, phat_1V, p_1V, "published"), wanted_1V)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.2])
def test_only_with_the_residual_do_toys_write_what_their_targets_would(temperature):
    assert toy_distance(0, temperature, is_exact=True) < 1e-12
    published = toy_distance(0, temperature, is_exact=False)
    assert published == 0 if temperature == 0 else published > 1e-5
