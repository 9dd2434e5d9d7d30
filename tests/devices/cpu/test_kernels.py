"""The compiled kernels against plain formulas, on this processor's instructions and on others."""

import ctypes
import itertools
import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from minitri.core.decoding.verification import Guesses, verify_block
from minitri.core.model.attention import attend_math
from minitri.core.model.linear import Linear
from minitri.core.settings import LONGEST_BLOCK
from minitri.devices.cpu import abi
from minitri.devices.cpu.kernel_layers import KernelLinear
from minitri.devices.cpu.kernels import Kernels, load_kernels
from minitri.devices.cpu.quantized import PANEL, Form, packed_shape, quantize
from tests.core.rigs import CPU, GREEDY
from tests.devices.cpu.conftest import compiled
from tests.devices.test_attention import random_case, random_mask

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
PIECE = 512
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def attend(kernels, q, *others):
    """Attention as in a pass: short blocks are computed as such."""
    return kernels.attend(q, *others, is_short=q.shape[1] <= LONGEST_BLOCK)


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def linear(kernels, x, weight, form=Form.PLAIN, num_outputs=None, bias=None, **options):
    """A linear layer of these weights by a compiled kernel."""
    like = Linear(torch.empty(num_outputs or len(weight), x.shape[-1], dtype=x.dtype), bias)
    return KernelLinear(like, kernels, weight, form).multiply(x, **options)


def in_tiles(kernels, *slots):
    """Keys and values in the layout that kernels read best."""
    tiles = kernels.make_slots(slots[0].shape, slots[0].dtype, CPU)
    for ours, theirs in zip(tiles, slots, strict=True):
        ours[...] = theirs
    return tiles


@pytest.mark.parametrize("instructions", ["AVX2", "AVX-512", "AVX-512 BF16", "AVX-512 BF16, AMX"])
@every_dtype
def test_kernels_read_the_slots_that_they_make_on_every_processor(instructions, dtype, monkeypatch):
    """The layout of slots follows from the instruction set's name, which this processor need not
    have; the numbers read back are those written, and tiles of another layout are refused."""
    monkeypatch.setattr(abi, "check_sizes", lambda _: None)
    library = Mock(**{"minitri_instructions.return_value": instructions.encode()})
    kernels = Kernels(library, num_threads=1)
    k, v = random(2, 3, 64, 32, dtype=dtype), random(2, 3, 64, 32, dtype=dtype, seed=1)
    keys, values = in_tiles(kernels, k, v)
    assert torch.equal(keys[:, :, :], k)
    assert torch.equal(values[:, :, :], v)


@every_dtype
@pytest.mark.parametrize("D", [64, 128, 80, 32, 6])
def test_attention_equals_the_oracle(kernels, dtype, D):
    """One token, several, a prefill; prefixes within a block of slots, across pieces and none; any
    mask; ragged rows; NaN after each; large scores. Over tiles it has the same bits."""
    cases = [(1, (0, 62, 63)), (1, (PIECE - 1, PIECE)), (3, (62, 1200)), (8, (PIECE - 4,))]
    for T, prefixes in [*cases, (LONGEST_BLOCK, (0, 100, 5)), (LONGEST_BLOCK + 71, (0, 130))]:
        q, k, v, lengths = random_case(T, prefixes, S=1344, D=D, dtype=dtype)
        tiles = in_tiles(kernels, k, v)
        for mask in (None, random_mask(T)):
            exact = attend_math(q.double(), k.double(), v.double(), lengths, mask)
            found = attend(kernels, q, k, v, lengths, mask)
            error = (found - exact).abs().max()
            assert error < TOLERANCE[dtype], (T, prefixes, mask is None, error)
            assert torch.equal(attend(kernels, q, *tiles, lengths, mask), found)
    q, k, v, lengths = random_case(4, (700,))
    for keys, queries in ((k * 1000, q * 1000), (k * 0, q), (k, q * 0)):  # nothing overflows
        exact = attend_math(queries.double(), keys.double(), v.double(), lengths)
        assert (attend(kernels, queries, keys, v, lengths) - exact).abs().max() < 1e-4


@every_dtype
def test_attention_of_a_token_has_the_same_bits_whatever_stands_next_to_it(kernels, dtype):
    """Threads are one to three; prefixes end near the boundaries of blocks and of pieces."""
    for prefix in (0, 50, 60, PIECE - 7, PIECE + 3, 1500):
        q, k, v, lengths = random_case(20, (prefix, prefix // 2), dtype=dtype)
        k, v = k.nan_to_num(1.0), v.nan_to_num(1.0)
        block = attend(kernels, q, k, v, lengths)
        for threads in (1, 3, 2):
            kernels.num_threads = threads
            assert torch.equal(attend(kernels, q, k, v, lengths), block)
        for t in range(20):
            alone = attend(kernels, q[:1, t : t + 1], k[:1], v[:1], [prefix + t])
            assert torch.equal(alone[0, 0], block[0, t]), (prefix, t)


@every_dtype
def test_what_is_not_finite_is_never_hidden(kernels, dtype):
    """One key, value or query of NaN, of any payload, makes a result of NaN, as with the oracle."""
    choices = ((1, 8), (0, 1, 2), (math.nan, -math.nan, math.inf))
    for T, which, value in itertools.product(*choices):
        *qkv, lengths = random_case(T, (700,), dtype=dtype)
        qkv[which][0, 0, 40 if which else 0, 3] = value
        wanted = attend_math(*qkv, lengths).isfinite()
        assert not attend(kernels, *qkv, lengths).isfinite()[~wanted].any(), (which, value)
        assert not wanted.all()
    x, weight = random(1, 3, 64, dtype=dtype), random(20, 64, dtype=dtype, seed=1)
    x[0, 1, 5] = math.nan
    for form in (Form.PLAIN, Form.Q4, Form.Q8):
        matrix = weight if form == Form.PLAIN else quantize(weight, form, load_kernels().repack)
        are_finite = linear(kernels, x, matrix, form).isfinite().all(2)
        assert are_finite.tolist() == [[True, False, True]]


def quantized(N, E, form):
    """A matrix of any bytes, whose scales and offsets are small."""
    generator = torch.Generator().manual_seed(1)
    shape = packed_shape(N, E, form)
    packed_NX = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    panels_PX = packed_NX.view(-1, PANEL * shape[1])  # all q first
    panels_PX[:, PANEL * E * form.bits // 8 :] %= 8 if form.is_nested else 24
    return packed_NX


@every_dtype
@pytest.mark.parametrize(
    ("form", "E"),
    [*((Form.PLAIN, E) for E in (576, 48, 33)), (Form.Q5, 32), (Form.Q5, 576)]
    + [(form, E) for form in (Form.Q4, Form.Q8) for E in (576, 32, 1056)]
    + [(form, E) for form in (Form.Q4_K, Form.Q5_K, Form.Q6_K) for E in (256, 2304)],
)
def test_linear_equals_plain_formulas(kernels, dtype, form, E):
    """Outputs fill no tile, rows come in two parts. To the bit, a row depends on itself alone."""
    N = 90
    weight = plain = random(N, E, dtype=dtype, seed=1) / E**0.5
    bias = random(N, dtype=dtype, seed=3)
    if form != Form.PLAIN:
        weight = quantized(N, E, form)
        packed, rows = (weight, N, E, form, torch.float32), torch.tensor([N - 1, 3, 3])
        plain = load_kernels().dequantize(*packed)
        assert torch.equal(kernels.dequantize(*packed), plain)
        assert torch.equal(kernels.dequantize(*packed, rows), plain[rows])
    for R, is_wide in itertools.product((1, 4, 7, 530), (False, True)):
        x = random(1, R, E, dtype=dtype)
        options = {"num_outputs": N, "bias": bias, "is_wide": is_wide}
        got = linear(kernels, x, weight, form, **options)
        assert got.dtype == (torch.float32 if is_wide else dtype)
        exact = x.double() @ plain.double().T + bias
        rounding = 2e-5 if form == Form.PLAIN else 5e-4  # of x, to 16 bits
        assert (got - exact).abs().max() < rounding + (not is_wide) * 3 * TOLERANCE[dtype]
        for rows in (slice(R - 1, R), slice(R // 2)):
            alone = linear(kernels, x[:, rows], weight, form, **options)
            assert torch.equal(alone, got[:, rows])
        many = {"num_outputs": N, "bias": bias, "kernel": "product"}
        product = linear(kernels, x[0], weight, form, **many)
        if form == Form.PLAIN:
            assert (product - exact[0]).abs().max() < 3 * TOLERANCE[dtype]
        elif not is_wide:
            assert torch.equal(product, got[0])
        assert torch.equal(linear(kernels, x[0, -1:], weight, form, **many), product[-1:])


@pytest.mark.slow
def test_a_kernel_without_memory_or_threads_is_an_error_and_the_next_call_works(tmp_path):
    """A number in their library makes kernels fail once: 1 a thread, 2 or 3 a task."""
    first, task = "#include <condition_variable>", "(*current)(num_tasks - left);"
    throw = "if (int now = {}; failing.compare_exchange_strong(now, 0)) throw {};".format
    no_thread = throw(1, "std::system_error(EAGAIN, std::generic_category())")
    no_memory = throw(2, "std::bad_alloc()") + throw(3, 1)
    failing = compiled(
        tmp_path,
        (first, f'{first}\n#include <atomic>\nextern "C" {{ std::atomic<int> failing; }}'),
        ("std::thread(&Pool::work", f"{no_thread} std::thread(&Pool::work"),
        (task, no_memory + task),
    )
    x, weight = random(1, 5, 576), random(900, 576, seed=1)
    for number, kind in ((1, RuntimeError), (2, MemoryError), (3, MemoryError)):
        ctypes.c_int.in_dll(failing.library, "failing").value = number
        with pytest.raises(kind, match="CPU kernel"):
            linear(failing, x, weight)
        for _ in range(3):
            assert torch.allclose(linear(failing, x, weight), x @ weight.T, atol=1e-3)


def wrong_calls():
    kernels = load_kernels()
    multiply, pack = partial(linear, kernels), partial(quantize, repack=kernels.repack)
    q, k, v, _ = random_case(3, (5, 9))
    mask = torch.ones(3, 3, dtype=torch.bool)
    swapped = lambda x, *axes: x.transpose(*axes).contiguous().transpose(*axes)  # noqa: E731
    for lengths in ([5, k.shape[2] - 2], [-1, 5], [5]):
        yield kernels.attend, q, k, v, lengths
    for wrong in (
        (q, k.double(), v),
        (q, k[:1], v[:1]),
        (q, k, swapped(v, 1, 2)),
        (q[:, :, :-1], k, v),
        (q.to("meta"), k, v),
    ):
        yield kernels.attend, *wrong, [5, 5]
    for wrong in (mask[:2], mask.int()):
        yield kernels.attend, q, k, v, [5, 5], wrong
    yield kernels.attend, *[torch.zeros(1, 1, 1, 1026)] * 3, [0]
    q, k, v, lengths = random_case(1, (5,), D=32, S=64)
    yield kernels.attend, q, in_tiles(kernels, k, v)[0], v, lengths
    x, weight, bias = random(2, 64), random(10, 64), random(10)
    for wrong in (weight.bfloat16(), random(10, 65)[:, :64]):
        yield multiply, x, wrong
    yield multiply, x, weight, Form.Q8
    yield multiply, x, pack(weight, 4), Form.Q8
    yield multiply, random(2, 65), pack(weight, 8), Form.Q8
    for rows in (torch.tensor([10]), torch.tensor([-1]), torch.tensor([1], dtype=torch.int32)):
        yield kernels.dequantize, pack(weight, 8), 10, 64, Form.Q8, torch.float32, rows
    for wrong in (bias[1:], bias.double(), random(20)[::2], bias.view(1, 10)):
        yield multiply, x, weight, {"bias": wrong}
    yield kernels.probs, random(2, 50).bfloat16(), GREEDY
    yield kernels.probs, random(50), GREEDY
    numbers, tokens, counts = torch.zeros(1, 3).double(), torch.tensor([[1, 1]]), torch.tensor([2])
    p, q = random(1, 3, 50), random(1, 2, 50)
    for guesses in ((tokens, q[..., :49], counts), (tokens, q, counts + 1), (tokens, p, counts)):
        yield kernels.verify, p, numbers, Guesses(*guesses), {"rule": verify_block}
    yield kernels.verify, p, numbers.float(), Guesses(tokens, q, counts), {"rule": verify_block}


def test_what_would_be_read_or_written_elsewhere_is_refused():
    for function, *arguments in wrong_calls():
        named = arguments.pop() if isinstance(arguments[-1], dict) else {}
        with pytest.raises(ValueError, match="^the CPU kernels cannot take torch.*$"):
            function(*arguments, **named)


def test_structs_of_another_size_and_unknown_fields_are_refused():
    with pytest.raises(OSError, match="AttentionArguments has another size in C"):
        abi.check_sizes(Mock(**{"minitri_sizeof.return_value": 0}))
    with pytest.raises(AttributeError, match="LinearArguments.* has no attribute 'weight'"):
        abi.LinearArguments(weight=None)
