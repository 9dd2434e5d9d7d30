"""Matrices of 4 and 8 bits: what they stand for, how they lie, what models make of them."""

import pytest
import torch

from minitri import load
from minitri.cpu import quantized
from minitri.cpu.kernel_layers import KernelTiedHead, quantized_copy
from minitri.cpu.kernels import load_kernels
from minitri.cpu.quantized import GROUP, quantize, row_widths
from minitri.model.linear import TiedHead
from minitri.model.llama import Block
from tests.conftest import new_cache
from tests.cpu.test_kernels import every_dtype, random

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")


@needs_kernels
@pytest.mark.parametrize("E", [32, 96, 576])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_weight_is_half_a_step_from_the_original(bits, E, monkeypatch):
    """And by the rounding of scales and offsets to float16; numbers of groups are odd and even, and
    groups of equal weights and of zeros keep them. The size of the slices changes nothing."""
    weight_NE = random(40, E)
    weight_NE[7], weight_NE[8] = 0, 1.5
    groups_NGQ = weight_NE.unflatten(1, (-1, GROUP))
    least, most = groups_NGQ.aminmax(dim=2, keepdim=True)
    steps = (most - least) / 15 if bits == 4 else groups_NGQ.abs().amax(2, keepdim=True) / 127
    packed_NX = quantize(weight_NE, bits)
    assert packed_NX.dtype == torch.uint8
    assert packed_NX.shape == (40, sum(row_widths(E, bits)))
    dequantize = load_kernels().dequantize
    whole = dequantize(packed_NX, E, bits, torch.float32)
    errors = (whole.view_as(groups_NGQ) - groups_NGQ).abs()
    assert (errors <= steps / 2 + 1e-3 * groups_NGQ.abs().amax(2, keepdim=True)).all()
    assert not errors[7].any()
    for numbers_at_once in (1, E * 7, E * 50):
        monkeypatch.setattr(quantized, "NUMBERS_AT_ONCE", numbers_at_once)
        again = dequantize(quantize(weight_NE, bits), E, bits, torch.bfloat16)
        assert torch.equal(again, whole.bfloat16())


@needs_kernels
@every_dtype
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_a_tied_head_are_those_of_its_matrix(bits, dtype):
    plain = TiedHead.empty(96, 50, dtype=dtype)
    head = KernelTiedHead(plain, load_kernels(), quantize(random(50, 96), bits), bits)
    table_VE = head.plain_weight(dtype)
    for numbers in (torch.tensor([[3, 49, 3], [0, 1, 2]]), torch.tensor(7), torch.tensor([[5]])):
        rows = head.rows(numbers)
        assert rows.dtype == dtype
        assert torch.equal(rows, table_VE[numbers])


@needs_kernels
def test_a_copy_in_4_bits_is_small_and_guesses_like_its_model(folder):
    model = load(folder, device="cpu", dtype="float32").model
    twin = quantized_copy(model)
    assert twin.num_bytes < model.num_bytes / 4
    tokens = torch.arange(5).unsqueeze(0)
    cache = new_cache(model.config, dtype=torch.float32)
    block = Block(tokens, tokens)
    exact, rough, again = (m.logits(m(block, cache)) for m in (model, twin, model))
    assert 0 < (exact - rough).norm() / exact.norm() < 0.6  # random weights: worse than any
    assert torch.equal(exact, again)  # a pass of the model does not take the copy's weights
