"""The compiled kernels against plain formulas, on this processor's instructions and on others."""

import ctypes
import math
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from minitri.cpu.kernels import DTYPES, SOURCE, Kernels, LinearArguments, address, load_kernels
from minitri.cpu.quantized import dequantize, quantize
from minitri.model.attention import attend_math
from minitri.settings import LONGEST_BLOCK
from tests.model.test_attention import random_case

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="there is no C++ compiler here")

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
INSTRUCTIONS = ["native"]
if platform.machine() == "x86_64":
    INSTRUCTIONS += ["x86-64-v3", "x86-64"]  # AVX2; SSE2, like any other 16-byte vectors
PIECE = 512
"""Slots of a piece of attention, as in the source."""
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(scope="module", params=INSTRUCTIONS)
def kernels(request, tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("kernels"), request.param)


def compiled(folder: Path, instructions: str = "native", change: tuple[str, str] = ("", "")):
    """Kernels for some instructions, where a text of the source may be changed to another; they
    run on two threads."""
    files = [SOURCE, *SOURCE.parent.glob("*.h")]
    assert any(change[0] in file.read_text() for file in files)
    for file in files:
        (folder / file.name).write_text(file.read_text().replace(*change, -1 if change[0] else 0))
    flags = ["-std=c++17", "-O1", f"-march={instructions}", "-shared", "-fPIC", "-pthread", "-w"]
    library = folder / "kernels.so"
    subprocess.run(["c++", *flags, str(folder / SOURCE.name), "-o", str(library)], check=True)
    return Kernels(ctypes.CDLL(str(library)), num_threads=2)


def attend(kernels, q, *others):
    """Attention as in a pass: short blocks are computed as such."""
    return kernels.attend(q, *others, is_short=q.shape[1] <= LONGEST_BLOCK)


def linear(kernels, x, weight, N, bits=16, *, norm=None, bias=None, residual=None, is_gated=False):
    """A linear layer with what a pass has around it, in the number type of x; `norm` is an RMSNorm
    of x."""
    out = x.new_empty(*x.shape[:-1], N // (1 + is_gated))
    eps = 1e-5 if norm is not None else 0
    tensors = (x, norm, weight, bias, residual, out)
    numbers = (x.numel() // x.shape[-1], x.shape[-1], N, is_gated, False, kernels.num_threads, eps)
    arguments = LinearArguments(*map(address, tensors), *numbers)
    kernels._linear(DTYPES[x.dtype], bits, ctypes.byref(arguments))
    return out


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


@every_dtype
@pytest.mark.parametrize("D", [64, 128, 80, 16, 6])
def test_attention_equals_the_oracle(kernels, dtype, D):
    """Blocks of one token, of several and of a prefill; prefixes within a block of slots, across
    pieces and none; causal or any rule; rows of different lengths; NaN after each."""
    for T, prefixes in (
        (1, (0,)),
        (1, (63,)),
        (1, (PIECE,)),
        (3, (62, 1200)),
        (8, (PIECE - 4,)),
        (24, (0, 37, 5)),
        (LONGEST_BLOCK, (100,)),
        (LONGEST_BLOCK + 71, (0, 130)),
    ):
        q, k, v, lengths = random_case(T, prefixes, D=D, dtype=dtype)
        tree = torch.rand(T, T, generator=torch.Generator().manual_seed(1)) < 0.3
        for rule in (None, tree | torch.eye(T, dtype=torch.bool)):
            exact = attend_math(q.double(), k.double(), v.double(), lengths, rule)
            error = (attend(kernels, q, k, v, lengths, rule).double() - exact).abs().max()
            assert error < TOLERANCE[dtype], (T, prefixes, rule is None, error)


@every_dtype
def test_attention_of_a_token_has_the_same_bits_whatever_stands_next_to_it(kernels, dtype):
    """In a block or alone, next to others, on one thread or three; the prefix ends near the
    boundaries of blocks of slots and of pieces."""
    for prefix in (0, 50, 60, PIECE - 7, PIECE + 3, 1500):
        q, k, v, _ = random_case(20, (prefix, prefix // 2), dtype=dtype)
        k, v = k.nan_to_num(1.0), v.nan_to_num(1.0)
        block = attend(kernels, q, k, v, [prefix, prefix // 2])
        for threads in (1, 3, 2):
            kernels.num_threads = threads
            assert torch.equal(attend(kernels, q, k, v, [prefix, prefix // 2]), block)
        for t in range(20):
            alone = attend(kernels, q[:1, t : t + 1], k[:1], v[:1], [prefix + t])
            assert torch.equal(alone[0, 0], block[0, t]), (prefix, t)


def test_attention_survives_scores_of_any_size(kernels):
    """Large scores, equal ones, and keys of zeros: nothing overflows."""
    q, k, v, lengths = random_case(4, (700,))
    for keys, queries in ((k * 1000, q * 1000), (k * 0, q), (k, q * 0)):
        exact = attend_math(queries.double(), keys.double(), v.double(), lengths)
        got = attend(kernels, queries, keys, v, lengths).double()
        assert (got - exact).abs().max() < 1e-4


@every_dtype
@pytest.mark.parametrize("T", [1, 8])
def test_what_is_not_finite_is_never_hidden(kernels, dtype, T):
    """One key, value or query of NaN, of any payload, makes a result of NaN, as with the oracle."""
    for name, place in (("q", (0, 0, 0, 3)), ("k", (0, 0, 40, 3)), ("v", (0, 0, 40, 3))):
        for value in (math.nan, -math.nan, math.inf):
            q, k, v, lengths = random_case(T, (700,), dtype=dtype)
            {"q": q, "k": k, "v": v}[name][place] = value
            got = attend(kernels, q, k, v, lengths).isfinite()
            wanted = attend_math(q, k, v, lengths).isfinite()
            assert not got[~wanted].any(), (name, value)
            assert not wanted.all()
    x, weight = random(1, 3, 64, dtype=dtype), random(20, 64, dtype=dtype, seed=1)
    x[0, 1, 5] = math.nan
    for options in ({}, {"is_gated": True}, {"norm": torch.ones(64, dtype=dtype)}):
        got = linear(kernels, x, weight, 20, **options).isfinite()
        assert got[0, [0, 2]].all()
        assert not got[0, 1].any()


@every_dtype
@pytest.mark.parametrize("E", [576, 64, 48, 33, 608])
@pytest.mark.parametrize("R", [1, 4, 6, 7, 25])
def test_linear_equals_plain_formulas(kernels, dtype, E, R):
    """With and without norm, bias, residual and gate; outputs that fill no tile."""
    N = 90
    x, weight = random(1, R, E, dtype=dtype), random(N, E, dtype=dtype, seed=1) / E**0.5
    norm, bias = random(E, dtype=dtype, seed=2), random(N, dtype=dtype, seed=3)
    residual = random(1, R, N, dtype=dtype, seed=4)
    exact, w = x.double(), weight.double()
    normed = F.rms_norm(exact, (E,), norm.double(), 1e-5)
    gate, up = (normed @ w.T).chunk(2, -1)
    plain = exact @ w.T
    for options, wanted in (
        ({"bias": bias}, plain + bias),
        ({"residual": residual}, plain + residual),
        ({"norm": norm}, normed @ w.T),
        ({"norm": norm, "is_gated": True}, F.silu(gate) * up),
    ):
        got = linear(kernels, x, weight, N, **options)
        assert (got - wanted).abs().max() < 3 * TOLERANCE[dtype]
    for is_wide, tolerance in ((False, 3 * TOLERANCE[dtype]), (True, 1e-5)):
        got = kernels.linear(x, weight, N, bias=bias, is_wide=is_wide)
        assert got.dtype == (torch.float32 if is_wide else dtype)
        assert (got - plain - bias).abs().max() < tolerance


@every_dtype
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("E", [576, 64, 32, 96, 1056])
def test_quantized_weights_multiply_as_the_numbers_that_they_stand_for(kernels, dtype, bits, E):
    """Odd and even numbers of groups, more of them than a vector holds."""
    x, weight = random(1, 7, E, dtype=dtype), random(50, E, seed=1) / E**0.5
    packed = quantize(weight, bits)
    exact = x.double() @ dequantize(packed, E, bits).double().T
    got = kernels.linear(x, packed, 50, bits, is_wide=True)
    assert (got - exact).abs().max() < 2e-5


@every_dtype
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_linear_layer_gives_a_row_the_same_bits_whatever_stands_next_to_it(kernels, dtype, bits):
    E, N = 608, 90
    x, weight = random(1, 25, E, dtype=dtype), random(N, E, dtype=dtype, seed=1)
    weight = weight if bits == 16 else quantize(weight, bits)
    norm, residual = random(E, dtype=dtype, seed=2), random(1, 25, N, dtype=dtype, seed=3)
    block = linear(kernels, x, weight, N, bits, norm=norm, residual=residual)
    gated = linear(kernels, x, weight, N, bits, norm=norm, is_gated=True)
    for threads in (1, 3, 2):
        kernels.num_threads = threads
        for r in range(25):
            one = x[:, r : r + 1]
            given = residual[:, r : r + 1]
            alone = linear(kernels, one, weight, N, bits, norm=norm, residual=given)
            assert torch.equal(alone[0, 0], block[0, r])
            alone = linear(kernels, one, weight, N, bits, norm=norm, is_gated=True)
            assert torch.equal(alone[0, 0], gated[0, r])


@every_dtype
def test_numbers_are_rounded_as_pytorch_rounds_them(kernels, dtype):
    """To the nearest, ties to even; denormal, too large, infinite and NaN."""
    wide = torch.cat(
        [
            random(4000) * 10.0 ** torch.arange(-10, 10).repeat_interleave(200),
            torch.tensor([0.0, -0.0, 65504, 65519.9, 65520, 1e-8, 6e-8, 3e38, math.inf, math.nan]),
            1 + torch.arange(64) / 2**9,
            1 + torch.arange(64) / 2**12,
        ]
    )
    eye, cos = wide.to(dtype).view(1, 1, 1, -1), torch.ones(1, 1, 1, len(wide))
    same = kernels.rotate(eye, cos, 0 * cos)  # x cos(0) + x' sin(0)
    finite = eye.isfinite() & eye.roll(len(wide) // 2, -1).isfinite()
    assert torch.equal(same[finite], eye[finite])
    half = kernels.rotate(eye, cos / 3, 0 * cos)
    assert torch.equal(half[finite], (eye.float() * (cos / 3)).to(dtype)[finite])


def test_the_norm_of_almost_zeros_is_bounded(kernels):
    """By its epsilon."""
    x, weight, norm = torch.full((1, 1, 64), 1e-6), torch.eye(64), torch.ones(64)
    got = linear(kernels, x, weight, 64, norm=norm)
    assert (got - 1e-6 / math.sqrt(1e-12 + 1e-5)).abs().max() < 1e-6


def test_a_forked_process_computes_too():
    """Threads do not survive a fork: neither the kernels' nor PyTorch's, nor what they hold."""
    program = """
import os, sys, threading, torch
from minitri.cpu.kernels import load_kernels
torch.set_num_threads(2)
kernels, x, weight = load_kernels(), torch.ones(1, 1, 64), torch.ones(4096, 64)
large = torch.randn(400, 4096, generator=torch.manual_seed(0))
def run():
    with kernels.reading():
        long = large @ large.T
    with kernels.decoding():
        return long.relu_().sum().item() + kernels.linear(x, weight, 4096).sum().item()
wanted, started, is_over = run(), threading.Event(), threading.Event()
def hold():
    with kernels.decoding():
        started.set()
        is_over.wait()
threading.Thread(target=hold, daemon=True).start()
started.wait()
if (child := os.fork()) == 0:
    os._exit(0 if abs(run() - wanted) < 1 else 1)
sys.exit(os.waitpid(child, 0)[1])
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are not listed here")
def test_threads_that_are_not_wanted_any_more_end():
    """Else each of them would wake for every kernel."""
    kernels, x, weight = load_kernels(), torch.ones(1, 1, 64), torch.ones(4096, 64)
    assert kernels is not None

    def num_threads(wanted: int) -> int:
        kernels.num_threads = wanted
        kernels.linear(x, weight, 4096)
        time.sleep(0.5)
        return len(list(Path("/proc/self/task").iterdir()))

    few = num_threads(2)
    assert num_threads(20) == few + 18
    assert num_threads(2) == few


MUTANTS = {
    "pieces begin where the prefix ends": (
        "begin = piece * PIECE;",
        "begin = num_pieces > 1 && piece ? piece * PIECE - a.lengths[b] % BLOCK : piece * PIECE;",
    ),
    "a token sees the next one": ("block : block + t + 1, 0)", "block : block + t + 2, 0)"),
    "a slot after the block is read": ("if (s + 1 < n) b", "if (s < n) b"),
    "a piece is left out of the merge": (
        "p = 0; p < num_pieces; ++p) {\n            const float w",
        "p = 1; p < num_pieces; ++p) {\n            const float w",
    ),
    "sums are not rescaled": ("store(sums, load(sums) * shrink);", ""),
    "totals are not rescaled": ("total *= shrink;", ""),
    "the rest of a row is skipped": ("if (e < E) {", "if (false) {"),
    "rows of a tile share an operand": (
        "rows.x + m * rows.stride + e / Op::STEP);\n        }\n",
        "rows.x + 0 * rows.stride + e / Op::STEP);\n        }\n",
    ),
    "no epsilon": ("+ float(a.eps)", ""),
    "NaN becomes a number": ("x < -126.0f ? splat(-126.0f) : x;", "maximum(x, splat(-126.0f));"),
    "half the scale": ("scale[o][i + half];", "scale[o][i];"),
}
"""Wrong kernels: a text of the source and what stands in its place."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_kernels_are_noticed(name, tmp_path):
    mutant = compiled(tmp_path, change=MUTANTS[name])
    dtype = torch.bfloat16
    with pytest.raises(AssertionError):  # noqa: PT012
        test_attention_equals_the_oracle(mutant, dtype, 64)
        test_attention_of_a_token_has_the_same_bits_whatever_stands_next_to_it(mutant, dtype)
        test_attention_survives_scores_of_any_size(mutant)
        test_what_is_not_finite_is_never_hidden(mutant, torch.float32, 1)
        test_linear_equals_plain_formulas(mutant, dtype, 48, 7)
        test_quantized_weights_multiply_as_the_numbers_that_they_stand_for(mutant, dtype, 4, 576)
        test_the_norm_of_almost_zeros_is_bounded(mutant)
