"""Packed weights give what plain weights give."""

import pytest
import torch

from minitri.core.model.linear import Linear, TiedHead, TrimmedHead
from minitri.devices.cpu.packed import can_pack, pack_linears


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
