"""The Triton kernels, run by Triton's interpreter on a CPU: what a GPU computes, but for the order of additions."""

from __future__ import annotations

import pytest
import torch

from minitri.attention import attend_math
from minitri.attention_cuda import GpuAttention, largest_error, tolerance
from tests.conftest import CPU
from tests.test_attention import random_case

triton = pytest.importorskip("triton", reason="needs triton, which is made for Linux")
if torch.cuda.is_available():
    pytest.skip("tests/gpu has them run on the device", allow_module_level=True)

from minitri.attention_triton import MAX_ROWS, NUM_KEYS, TritonAttention  # noqa: E402


@triton.jit
def count(out, n):
    for i in range(0, n):
        triton.language.store(out + i, i)


try:
    count[(1,)](torch.zeros(3), 3)
except triton.runtime.errors.InterpreterError as error:
    pytest.skip(f"this Triton's interpreter runs no loops: {error}", allow_module_level=True)


def backends():
    return [TritonAttention(num_processors=n) for n in (1, 9)]


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("prefixes", [(0,), (0, 37, NUM_KEYS + 5), (NUM_KEYS - 1, 2 * NUM_KEYS, 300)])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_the_kernels_equal_the_oracle(T, prefixes, heads):
    """MHA, GQA and MQA, ragged rows, empty rows, prefixes that end on and around the border of a tile, NaN behind."""
    q, k, v, lengths = random_case(T, prefixes, *heads, D=16, S=NUM_KEYS * 5 + 40)
    exact = attend_math(q.double(), k.double(), v.double(), lengths)
    for backend in backends():
        got = backend(q, k, v, torch.tensor(lengths), None)
        assert (got - exact).abs().max() < 3e-6, backend


def test_more_rows_than_a_tile_are_read_for_in_turns():
    q, k, v, lengths = random_case(17, (70, 3), 5, 1, D=16, S=NUM_KEYS * 2)
    assert MAX_ROWS < 17 * 5
    exact = attend_math(q.double(), k.double(), v.double(), lengths)
    for backend in backends():
        assert (backend(q, k, v, torch.tensor(lengths), None) - exact).abs().max() < 3e-6


@pytest.mark.parametrize("rows", [slice(1, 2), slice(1, 3)])
def test_a_part_of_a_cache_is_read_where_it_lies(rows):
    """Rows of one layer of a larger cache, and queries that are a part of a larger tensor: nothing is copied."""
    q, k, v, lengths = random_case(2, (40, 200, 7), 4, 2, D=16, S=NUM_KEYS * 4)
    layers_k, layers_v = (torch.stack((torch.full_like(slots, torch.nan), slots)) for slots in (k, v))
    wide_q = torch.cat((torch.full_like(q, torch.nan), q), 2)[:, :, 4:]
    exact = attend_math(q, k, v, lengths)[rows]
    for backend in backends():
        got = backend(wide_q[rows], layers_k[1, rows], layers_v[1, rows], torch.tensor(lengths[rows]), None)
        assert got.is_contiguous()
        assert (got - exact).abs().max() < 3e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])  # the interpreter takes bfloat16 for integers
def test_it_passes_the_test_of_every_boot(dtype):
    backend = TritonAttention(num_processors=7)
    assert largest_error(backend, CPU, dtype, 6, 2, 32) <= tolerance(dtype)


def test_a_tree_goes_to_the_plain_formulas():
    q, k, v, lengths = random_case(3, (20, 60), 4, 2, D=16, S=NUM_KEYS * 2)
    rule = torch.eye(3, dtype=torch.bool)
    got = GpuAttention(TritonAttention(num_processors=1))(q, k, v, lengths, rule, torch.tensor(lengths))
    assert (got - attend_math(q, k, v, lengths, rule)).abs().max() < 3e-6
