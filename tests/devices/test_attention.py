"""Attention and linear layers by PyTorch's own operations against the plain formulas."""

import pytest
import torch

from minitri.core.model.attention import attend_math
from minitri.core.model.linear import Linear, TiedHead, TrimmedHead
from minitri.devices.cpu.pytorch import attend_cpu, can_pack, pack_linears
from minitri.devices.gpu.attention_backends import GpuAttention


def random_case(T, prefixes, H=6, K=2, D=16, S=None, seed=0, dtype=torch.float32):
    """Queries, keys, values and lengths; NaN after each row's block."""
    generator = torch.Generator().manual_seed(seed)
    S = S or max(prefixes) + T + 70
    B = len(prefixes)
    shapes = ((B, T, H, D), (B, K, S, D), (B, K, S, D))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    for b, prefix in enumerate(prefixes):
        k[b, :, prefix + T :] = torch.nan
        v[b, :, prefix + T :] = torch.nan
    return q, k, v, list(prefixes)


def random_mask(T: int) -> torch.Tensor:
    """A tree's mask: every token sees itself and some of those before it; a part of a tensor."""
    some = torch.rand(T + 1, T + 1, generator=torch.Generator().manual_seed(T)) < 0.3
    return (torch.eye(T + 1, dtype=torch.bool) | some.tril())[1:, 1:]


fused = GpuAttention()
"""With lengths on the host, PyTorch's attention of long blocks, on this device."""


def oracle(q, k, v, lengths, mask=None):
    return attend_math(q.double(), k.double(), v.double(), lengths, mask)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("attend", [attend_cpu, fused, attend_math])
def test_every_path_equals_the_oracle(attend, heads):
    """Trees reach all but a GPU's."""
    for T in (1, 2, 24, 40):
        for prefixes in ((0,), (1,), (63,), (64,), (100,), (0, 37, 5), (90, 90, 90)):
            case = random_case(T, prefixes, *heads)
            assert (attend(*case) - oracle(*case)).abs().max() < 2e-6, (T, prefixes)
        if T > 2 and attend is not fused:
            mask = random_mask(T)
            got = attend(*case, mask)
            assert (got - oracle(*case, mask)).abs().max() < 2e-6
            assert (got - oracle(*case)).abs().max() > 1e-3  # the mask does something


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_far_from_zero_stay_within_the_rounding(dtype):
    bound = {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 0.01}[dtype]
    q, k, *others = random_case(4, (150,), dtype=dtype)
    # Every score of a query is hundreds from 0, in the last two on the same side.
    for case in ((100 * q, k), (100 * q.abs(), k.abs()), (100 * q.abs(), -k.abs())):
        error = (attend_cpu(*case, *others) - oracle(*case, *others)).abs()
        assert error.mean() < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Linear, TiedHead, TrimmedHead])
def test_a_packed_layer_computes_what_the_plain_one_does(kind, dtype):
    if not can_pack(dtype, torch.device("cpu")):
        pytest.skip(f"no packed kernel for {dtype} on this CPU")
    if kind is TrimmedHead:
        layer = TrimmedHead(48, 200, 300, dtype=dtype)
        layer.token_ids.copy_(torch.arange(200) + 50)
    else:
        layer = kind.empty(48, 200, dtype=dtype)
    weight = next(layer.parameters()).normal_(generator=torch.manual_seed(0))
    inputs = [torch.randn(*shape, 48).to(dtype) for shape in ((1, 1), (1, 5), (3, 1), (2, 70))]
    plain = [layer(x) for x in inputs]
    packed = torch.nn.ModuleList([layer])
    pack_linears(packed)
    kinds = {type(module) for module in packed.modules()}
    assert kinds.isdisjoint({Linear, TiedHead})
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for x, wanted in zip(inputs, plain, strict=True):
        torch.testing.assert_close(packed[0](x), wanted, rtol=tolerance, atol=tolerance)
    if kind is TiedHead:
        numbers = torch.arange(200).view(2, -1)
        assert torch.equal(packed[0].rows(numbers), weight[numbers])
    if kind is TrimmedHead:
        assert (plain[0] == -torch.inf).sum(-1).eq(100).all()
