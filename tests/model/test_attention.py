"""Attention by PyTorch's own operations against the plain formulas."""

import pytest
import torch

from minitri.cpu import flash_attention
from minitri.cpu.flash_attention import PIECES, SHORT_BLOCK, SPLIT_PREFIX, attend_cpu, merge_by_lse
from minitri.gpu.attention_backends import attend_fused
from minitri.model.attention import attend_math


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


BLOCKS = (1, 2, SHORT_BLOCK, SHORT_BLOCK + 1, 40)
PREFIXES = ((0,), (1,), (PIECES - 1,), (63,), (64,), (100,), (0, 37, 5))


@pytest.mark.parametrize("T", BLOCKS)
@pytest.mark.parametrize("prefixes", PREFIXES)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("split_prefix", [SPLIT_PREFIX, 0])
def test_cpu_paths_equal_the_oracle(T, prefixes, heads, split_prefix, monkeypatch):
    """Flash over the prefix as a whole, and over pieces of it."""
    monkeypatch.setattr(flash_attention, "SPLIT_PREFIX", split_prefix)
    H, K = heads
    q, k, v, lengths = random_case(T, prefixes, H, K)
    exact = attend_math(q.double(), k.double(), v.double(), lengths)
    for path in (attend_cpu, attend_math):
        assert (path(q, k, v, lengths) - exact).abs().max() < 2e-6


@pytest.mark.parametrize("T", [1, 5, SHORT_BLOCK])
@pytest.mark.parametrize("end", [SPLIT_PREFIX + 1, 2048, 2049, 2050, 2051, 2052, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_windows_of_many_kernel_blocks_equal_the_oracle(T, end, dtype):
    """At the sizes where they are used: windows that overlap by 0 to 3 slots, of which the kernel's
    last block may hold nothing else, for rows alone and next to others of the same length and of
    another one."""
    for ends in ((end,), (end, end), (end, 1700)):
        q, k, v, lengths = random_case(T, [end - T for end in ends], dtype=dtype)
        exact = attend_math(q.double(), k.double(), v.double(), lengths)
        assert (attend_cpu(q, k, v, lengths) - exact).abs().max() < (
            2e-6 if dtype == torch.float32 else 0.01
        )


@pytest.mark.parametrize("T", BLOCKS)
def test_the_gpu_call_equals_the_oracle(T):
    """Its CPU twin: the same call of PyTorch's fused attention, on this device."""
    q, k, v, lengths = random_case(T, (0, 33))
    got = attend_fused(q, k, v, lengths)
    assert (got - attend_math(q, k, v, lengths)).abs().max() < 2e-6


@pytest.mark.parametrize("T", [3, SHORT_BLOCK + 4])
@pytest.mark.parametrize("path", ["attend", "attend in pieces", "fused"])
def test_a_tree_rule_replaces_causality_inside_the_block_only(T, path, monkeypatch):
    q, k, v, lengths = random_case(T, (20,))
    generator = torch.Generator().manual_seed(2)
    rule = torch.eye(T, dtype=torch.bool) | (torch.rand(T, T, generator=generator) < 0.3).tril()
    if path != "fused":
        monkeypatch.setattr(
            flash_attention, "SPLIT_PREFIX", 0 if "pieces" in path else SPLIT_PREFIX
        )
        got = attend_cpu(q, k, v, lengths, rule)
    else:
        got = attend_fused(q, k, v, lengths, rule)
    assert (got - attend_math(q, k, v, lengths, rule)).abs().max() < 2e-6
    assert (got - attend_math(q, k, v, lengths)).abs().max() > 1e-3  # the rule does something


def test_rows_of_equal_length_are_read_together_and_give_what_they_give_alone():
    for T in (1, 5, SHORT_BLOCK + 1):
        q, k, v, lengths = random_case(T, (90, 90, 90))
        alone = [
            attend_cpu(q[b : b + 1], k[b : b + 1], v[b : b + 1], lengths[b : b + 1])
            for b in range(3)
        ]
        assert (attend_cpu(q, k, v, lengths) - torch.cat(alone)).abs().max() < 1e-6


@pytest.mark.parametrize("where", ["around", "above", "below"])
def test_scores_far_from_zero_neither_overflow_nor_vanish(where):
    for dtype, bound in ((torch.float32, 2e-5), (torch.bfloat16, 0.03), (torch.float16, 0.01)):
        q, k, v, lengths = random_case(4, (150,), dtype=dtype)
        q *= 100
        if where != "around":  # every score of a query is some hundreds from 0 on the same side
            q, k = q.abs(), k.abs() if where == "above" else -k.abs()
        got = attend_cpu(q, k, v, lengths).double()
        assert (got - attend_math(q.double(), k.double(), v.double(), lengths)).abs().mean() < bound


def test_a_chain_in_two_blocks_equals_one_block():
    q, k, v, lengths = random_case(30, (50,))
    whole = attend_cpu(q, k, v, lengths)
    halves = torch.cat((attend_cpu(q[:, :12], k, v, [50]), attend_cpu(q[:, 12:], k, v, [62])), 1)
    assert (whole - halves).abs().max() < 2e-6


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("prefix", [500, 5120])
def test_bfloat16_errors_stay_within_its_rounding(T, prefix):
    q, k, v, lengths = random_case(T, (prefix,), dtype=torch.bfloat16)
    exact = attend_math(q.double(), k.double(), v.double(), lengths)
    assert (attend_cpu(q, k, v, lengths) - exact).abs().max() < 0.02


def test_merging_by_lse_survives_extreme_scores():
    left, right = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
    low, high = torch.full((1, 1, 1), -1e4), torch.full((1, 1, 1), 1e4)
    assert torch.equal(merge_by_lse(left, low, right, high), right)
    assert torch.equal(merge_by_lse(left, high, right, low), left)
