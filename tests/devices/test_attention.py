"""Attention by PyTorch's own operations against the plain formulas."""

import pytest
import torch

from minitri.core.model.attention import attend_math
from minitri.devices.cpu.flash_attention import attend_cpu
from minitri.devices.gpu.attention_backends import attend_fused


def random_case(T, prefixes, H=6, K=2, D=16, S=None, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    S = S or max(prefixes) + T + 70
    B = len(prefixes)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    q, k, v = draw(B, T, H, D), draw(B, K, S, D), draw(B, K, S, D)
    for b, prefix in enumerate(prefixes):  # whoever reads after the block, reads NaN
        k[b, :, prefix + T :] = torch.nan
        v[b, :, prefix + T :] = torch.nan
    return q, k, v, list(prefixes)


def oracle(q, k, v, lengths, rule=None):
    return attend_math(q.double(), k.double(), v.double(), lengths, rule)


BLOCKS = (1, 2, 24, 40)
PREFIXES = ((0,), (1,), (3,), (63,), (64,), (100,), (0, 37, 5), (90, 90, 90))


@pytest.mark.parametrize("T", BLOCKS)
@pytest.mark.parametrize("prefixes", PREFIXES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("attend", [attend_cpu, attend_fused, attend_math])
def test_every_path_equals_the_oracle(attend, T, prefixes, heads):
    """`attend_fused` is a GPU's call, on this device."""
    case = random_case(T, prefixes, *heads)
    assert (attend(*case) - oracle(*case)).abs().max() < 2e-6


@pytest.mark.parametrize("T", [3, 28])
def test_a_tree_rule_replaces_causality_inside_the_block_only(T):
    case = random_case(T, (22,))
    generator = torch.Generator().manual_seed(2)
    rule = torch.eye(T, dtype=torch.bool) | (torch.rand(T, T, generator=generator) < 0.3).tril()
    got = attend_cpu(*case, rule)
    assert (got - oracle(*case, rule)).abs().max() < 2e-6
    assert (got - oracle(*case)).abs().max() > 1e-3  # the rule does something


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("ends", [(500,), (2051,), (2052, 2052), (5124, 1700)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_over_long_prefixes_stay_within_the_rounding(T, ends, dtype):
    case = random_case(T, [end - T for end in ends], dtype=dtype)
    error = (attend_cpu(*case) - oracle(*case)).abs().max()
    assert error < (2e-6 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("where", ["around", "above", "below"])
def test_scores_far_from_zero_neither_overflow_nor_vanish(where):
    for dtype, bound in ((torch.float32, 2e-5), (torch.bfloat16, 0.03), (torch.float16, 0.01)):
        q, k, v, lengths = random_case(4, (150,), dtype=dtype)
        q *= 100
        if where != "around":  # every score of a query is some hundreds from 0 on the same side
            q, k = q.abs(), k.abs() if where == "above" else -k.abs()
        error = attend_cpu(q, k, v, lengths) - oracle(q, k, v, lengths)
        assert error.abs().mean() < bound
