"""Packed weights give what plain weights give."""

import pytest
import torch

from minitri.core.model.linear import Linear, TiedHead, TrimmedHead
from minitri.devices.cpu.packed import PackedLinear, PackedTiedHead, can_pack, pack_linears

NUM_ROWS = 200


def filled(layer: Linear) -> Linear:
    torch.manual_seed(0)
    torch.nn.init.normal_(layer.weight)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Linear, TiedHead, TrimmedHead])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1), (2, 70)])
def test_a_packed_layer_computes_what_the_plain_one_does(kind, dtype, shape):
    if not can_pack(dtype, torch.device("cpu")):
        pytest.skip(f"no packed kernel for {dtype} on this CPU")
    if kind is TrimmedHead:
        layer = TrimmedHead(48, NUM_ROWS, 300, dtype=dtype)
        filled(layer.linear)
        layer.token_ids.copy_(torch.arange(NUM_ROWS) + 50)
    else:
        layer = filled(kind.empty(48, NUM_ROWS, dtype=dtype))
    x = torch.randn(*shape, 48).to(dtype)
    plain, weight = layer(x), next(layer.parameters())
    model = torch.nn.ModuleList([layer])
    pack_linears(model)
    kinds = {type(module) for module in model.modules()}
    assert kinds & {PackedLinear, PackedTiedHead}
    assert kinds.isdisjoint({Linear, TiedHead})
    if kind is TiedHead:
        numbers = torch.arange(NUM_ROWS).view(2, -1)
        assert torch.equal(model[0].rows(numbers), weight[numbers])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(model[0](x), plain, rtol=tolerance, atol=tolerance)
    if kind is TrimmedHead:
        assert (plain == -torch.inf).sum(-1).eq(100).all()
