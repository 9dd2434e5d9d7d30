"""Packed weights give what plain weights give."""

import pytest
import torch

from minitri.cpu.packed import PackedLinear, PackedTiedHead, can_pack, pack_linears
from minitri.model.linear import Linear, TiedHead, TrimmedHead

CPU = torch.device("cpu")
NUM_ROWS = 200  # no multiple of the block


def filled(layer: Linear) -> Linear:
    torch.manual_seed(0)
    torch.nn.init.normal_(layer.weight)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Linear, TiedHead])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1), (2, 70)])
def test_a_packed_layer_computes_what_the_plain_one_does(kind, dtype, shape):
    if not can_pack(dtype, CPU):
        pytest.skip(f"no packed kernel for {dtype} on this CPU")
    model = torch.nn.ModuleList([filled(kind.empty(48, NUM_ROWS, dtype=dtype))])
    x = torch.randn(*shape, 48).to(dtype)
    plain = model[0](x)
    pack_linears(model)
    layer = model[0]
    assert type(layer) is (PackedTiedHead if kind is TiedHead else PackedLinear)
    assert layer(x).shape == (*shape, NUM_ROWS)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(layer(x), plain, rtol=tolerance, atol=tolerance)


def test_a_packed_tied_head_still_gives_the_rows_of_the_embedding_table():
    head = filled(TiedHead.empty(48, NUM_ROWS, dtype=torch.bfloat16))
    table, numbers = head.weight.clone(), torch.arange(NUM_ROWS).view(2, -1)
    assert torch.equal(head.rows(numbers), table[numbers])
    plain, head = head, PackedTiedHead(head)
    assert not hasattr(plain, "weight")
    assert torch.equal(head.rows(numbers), table[numbers])
    assert head.weight.numel() == 256 * 48  # the only copy, the last block filled up


def test_every_linear_layer_of_a_model_is_packed_wherever_it_is():
    if not can_pack(torch.float32, CPU):
        pytest.skip("no packed kernel for float32 on this CPU")
    head = TrimmedHead(48, NUM_ROWS, 300, dtype=torch.float32)
    filled(head.linear)
    head.token_ids.copy_(torch.arange(NUM_ROWS) + 50)
    x = torch.randn(2, 48)
    plain = head(x)
    pack_linears(head)
    assert isinstance(head.linear, PackedLinear)
    torch.testing.assert_close(head(x), plain)
    assert (plain == -torch.inf).sum(1).tolist() == [100, 100]
