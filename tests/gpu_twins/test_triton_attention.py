"""The Triton kernels equal the oracle: on a CPU run by Triton's interpreter, on a GPU compiled."""

from __future__ import annotations

import pytest
import torch

from minitri.gpu import attention
from minitri.gpu.attention import GpuAttention, Math, ShortBlock, TritonAttention
from minitri.gpu.backend_choice import largest_error, tolerance
from minitri.model.attention import attend_math
from minitri.settings import LONGEST_BLOCK
from tests.conftest import tiny_config
from tests.model.test_attention import random_case

triton = pytest.importorskip("triton", reason="needs triton, which is made for Linux")

from minitri.gpu.kernels.attention import MAX_ROWS, NUM_KEYS  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
D = 64 if ON_GPU else 16
DTYPES = [torch.float16, torch.float32] + [
    torch.bfloat16
] * ON_GPU  # which the interpreter takes for integers


@triton.jit
def count(out, n):
    for i in range(0, n):
        triton.language.store(out + i, i)


try:
    count[(1,)](torch.zeros(3, device=DEVICE), 3)
except triton.runtime.errors.InterpreterError as error:  # of older versions beside a newer NumPy
    pytest.skip(f"this Triton's interpreter runs no loops: {error}", allow_module_level=True)


def backends():
    return [TritonAttention(num_processors=n) for n in (1, 9)]


def error_of(backend, q, keys, values, lengths, rows=slice(None), rule=None) -> float:
    """The largest one, by the oracle, of a case on the CPU, from these rows of it."""
    exact = attend_math(q.double(), keys.double(), values.double(), lengths, rule)[rows]
    q, keys, values = (tensor.to(DEVICE)[rows] for tensor in (q, keys, values))
    lengths_B = torch.tensor(lengths, device=DEVICE)[rows]
    got = backend(ShortBlock(q, keys, values, lengths_B, None if rule is None else rule.to(DEVICE)))
    assert got.is_contiguous()
    return float((got.double().cpu() - exact).abs().max().nan_to_num(torch.inf))


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize(
    "prefixes", [(0,), (0, 37, NUM_KEYS + 5), (NUM_KEYS - 1, 2 * NUM_KEYS, 300)]
)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_the_kernels_equal_the_oracle(T, prefixes, heads):
    """MHA and GQA, ragged rows, empty rows, prefixes that end on and around the border of a tile,
    NaN behind."""
    case = random_case(T, prefixes, *heads, D=D, S=NUM_KEYS * 5 + 40)
    for backend in backends():
        assert error_of(backend, *case) < 3e-6


def test_more_rows_than_a_tile_are_read_for_side_by_side():
    case = random_case(17, (70, 3), 5, 1, D=D, S=NUM_KEYS * 2)
    assert MAX_ROWS < 17 * 5
    for backend in backends():
        assert error_of(backend, *case) < 3e-6


@pytest.mark.parametrize("rows", [slice(1, 2), slice(1, 3)])
def test_a_part_of_a_cache_is_read_where_it_lies(rows):
    """Rows of a larger cache, and queries and slots that are parts of larger tensors: nothing is
    copied."""
    q, keys, values, lengths = random_case(2, (40, 200, 7), 4, 2, D=D, S=NUM_KEYS * 4)
    wide_q = torch.cat((torch.full_like(q, torch.nan), q), 2)[:, :, 4:]
    keys, values = (
        torch.cat((slots, torch.full_like(slots, torch.nan)), 1)[:, :2] for slots in (keys, values)
    )
    assert not wide_q.is_contiguous()
    assert not keys.is_contiguous()
    for backend in backends():
        assert error_of(backend, wide_q, keys, values, lengths, rows) < 3e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_passes_the_test_of_every_boot(dtype):
    backend = TritonAttention(num_processors=9)
    config = tiny_config(num_heads=1, num_kv_heads=1, head_dim=128)
    for T in (3, LONGEST_BLOCK if dtype != torch.float32 or ON_GPU else NUM_KEYS // 2):
        assert largest_error(backend, DEVICE, dtype, config, T) <= tolerance(dtype)


def test_heads_of_odd_sizes_are_refused():
    q, keys, values, lengths = random_case(1, (20,), 4, 2, D=48)
    with pytest.raises(RuntimeError, match="heads of 16, 32, 64, ... numbers, not of 48"):
        backends()[0](ShortBlock(q, keys, values, torch.tensor(lengths)))


def random_rule(T: int) -> torch.Tensor:
    """Every token sees itself and some of those before it; a part of a larger tensor."""
    some = torch.rand(T + 1, T + 1, generator=torch.Generator().manual_seed(T)) < 0.3
    return (torch.eye(T + 1, dtype=torch.bool) | some.tril())[1:, 1:]


@pytest.mark.parametrize("T", [1, 6, 17])
@pytest.mark.parametrize("prefixes", [(0,), (NUM_KEYS - 3, 2 * NUM_KEYS)])
@pytest.mark.parametrize("heads", [(2, 2), (3, 1)])
def test_a_trees_rule_replaces_causality_inside_the_block(T, prefixes, heads):
    """Blocks within a tile of keys, across its border and from it on; more rows than a tile."""
    rule = random_rule(T)
    assert T == 1 or not rule.is_contiguous()
    case = random_case(T, prefixes, *heads, D=D, S=NUM_KEYS * 3)
    for backend in backends():
        assert error_of(backend, *case, rule=rule) < 3e-6
    if T > 1:  # the rule does something
        q, keys, values, lengths = case
        chain = backends()[0](
            ShortBlock(*(x.to(DEVICE) for x in (q, keys, values)), torch.tensor(lengths).to(DEVICE))
        )
        exact = attend_math(q, keys, values, lengths, rule)
        assert (chain.cpu() - exact).abs().max() > 1e-3


def test_only_a_backend_that_is_causal_leaves_trees_to_the_plain_formulas(monkeypatch):
    q, keys, values, lengths = random_case(3, (20, 60), 4, 2, D=D, S=NUM_KEYS * 2)
    case = [tensor.to(DEVICE) for tensor in (q, keys, values)]
    rule, lengths_B = random_rule(3).to(DEVICE), torch.tensor(lengths, device=DEVICE)
    exact = attend_math(*case, lengths, rule)
    plain = []

    class Spy(Math):
        def __call__(self, block):
            plain.append(block)
            return super().__call__(block)

    class Causal(TritonAttention):
        only_causal = True

    monkeypatch.setattr(attention, "Math", Spy)
    for backend, num_plain in ((backends()[0], 0), (Causal(num_processors=1), 1)):
        got = GpuAttention(backend)(*case, lengths, rule, lengths_B)
        assert (got - exact).abs().max() < 3e-6
        assert len(plain) == num_plain


def test_a_backend_that_is_wrong_for_trees_only_fails_the_test_of_every_boot():
    class ForgetsRules(TritonAttention):
        def __call__(self, block):
            return super().__call__(block._replace(rule_TT=None))

    config = tiny_config(num_heads=2, num_kv_heads=2, head_dim=16)
    for kind, is_right in ((TritonAttention, True), (ForgetsRules, False)):
        error = largest_error(kind(num_processors=2), DEVICE, torch.float32, config, 3)
        assert (error <= tolerance(torch.float32)) is is_right
