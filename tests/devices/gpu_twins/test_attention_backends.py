"""Every backend for short blocks equals the oracle: on a CPU the Triton kernel is run by Triton's
interpreter, and FlashAttention has a stand-in; on a GPU ours is compiled."""

import sys

import pytest
import torch
import torch.nn.functional as F

from minitri.core import settings
from minitri.core.errors import InputError
from minitri.core.model.attention import attend_math
from minitri.core.settings import LONGEST_BLOCK
from minitri.devices.gpu import attention_backends
from minitri.devices.gpu.attention_backends import (
    TOLERANCES,
    GpuAttention,
    attend_flash,
    attend_masked,
)
from tests.core.rigs import CPU, tiny_config
from tests.devices.gpu_twins.conftest import DEVICE, ON_GPU, TWINS
from tests.devices.test_attention import random_case

D = 64 if ON_GPU else 16
TILE = 64
"""Keys of a tile of the kernel."""
CONFIG = tiny_config(num_heads=6, num_kv_heads=2, head_dim=16)

try:
    import triton

    from minitri.devices.gpu.kernels.flash_decoding import MAX_ROWS, NUM_KEYS, attend_short_block

    @triton.jit
    def count(out, n):
        for i in range(0, n):
            triton.language.store(out + i, i)

    count[(1,)](torch.zeros(3, device=DEVICE), 3)
    assert NUM_KEYS == TILE
    KERNELS = {"triton": attend_short_block}
except ImportError:
    KERNELS = {}
except triton.runtime.errors.InterpreterError:  # of older versions next to a newer NumPy
    KERNELS = {}

BACKENDS = {**TWINS, **KERNELS}
ours = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
needs_triton = pytest.mark.skipif(not KERNELS, reason="needs triton and its interpreter")


def random_rule(T: int) -> torch.Tensor:
    """Every token sees itself and some of those before it; a part of a larger tensor."""
    some = torch.rand(T + 1, T + 1, generator=torch.Generator().manual_seed(T)) < 0.3
    return (torch.eye(T + 1, dtype=torch.bool) | some.tril())[1:, 1:]


def error_of(backend, q, keys, values, lengths, rows=slice(None), rule=None) -> float:
    """The largest one, by the oracle, of a case on the CPU, from these rows of it, as a share of
    what rounding explains. On a GPU flash takes no float32."""
    if ON_GPU and getattr(backend, "func", None) is attend_flash:
        q, keys, values = q.bfloat16(), keys.bfloat16(), values.bfloat16()
    exact = attend_math(q.double(), keys.double(), values.double(), lengths, rule)[rows]
    q, keys, values = (tensor.to(DEVICE)[rows] for tensor in (q, keys, values))
    lengths_B = torch.tensor(lengths, device=DEVICE)[rows]
    got = backend(q, keys, values, lengths_B, None if rule is None else rule.to(DEVICE))
    error = float((got.double().cpu() - exact).abs().max().nan_to_num(torch.inf))
    return error / (TOLERANCES[q.dtype] if ON_GPU else 3e-6)


@ours
@pytest.mark.parametrize("T", [1, 3, 5, 17])
@pytest.mark.parametrize("prefixes", [(0, 37, TILE + 5), (TILE - 3, 2 * TILE, 300)])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("is_tree", [False, True])
def test_every_backend_equals_the_oracle(is_tree, heads, prefixes, T, backend):
    """MHA, GQA and MQA, ragged rows, empty rows, prefixes that end on and around the border of a
    tile, NaN after; more rows than a tile; chains and trees' rules."""
    case = random_case(T, prefixes, *heads, D=D, S=TILE * 5 + 40)
    rule = random_rule(T) if is_tree else None
    assert error_of(backend, *case, rule=rule) < 1
    if is_tree and T > 1:
        assert (attend_math(*case, rule) - attend_math(*case)).abs().max() > 1e-3


@ours
@pytest.mark.parametrize("rows", [slice(0, 3), slice(1, 2), slice(1, 3)])
@pytest.mark.parametrize("is_staged", [False, True])
def test_a_part_of_a_cache_is_read_where_it_lies(rows, is_staged, backend):
    """Rows of a larger cache, queries and slots that are parts of larger tensors, tokens first as
    in a staging buffer: nothing is copied, offsets count."""
    q, keys, values, lengths = random_case(2, (40, 200, 7), 4, 2, D=D, S=TILE * 4)
    wide_q = torch.cat((torch.full_like(q, torch.nan), q), 2)[:, :, 4:]
    keys, values = (
        torch.cat((slots, torch.full_like(slots, torch.nan)), 1)[:, :2] for slots in (keys, values)
    )
    if is_staged:
        kv_BSPKD = torch.stack((keys, values), 2).transpose(1, 3).contiguous()
        keys, values = kv_BSPKD.transpose(1, 3).unbind(2)
    assert not wide_q.is_contiguous()
    assert error_of(backend, wide_q, keys, values, lengths, rows) < 1


@needs_triton
@pytest.mark.parametrize("num_processors", [1, 9, 132])
def test_a_prefix_is_cut_in_as_many_pieces_as_there_are_processors(num_processors, monkeypatch):
    """More rows than a tile, too."""
    kernels = sys.modules["minitri.devices.gpu.kernels.flash_decoding"]
    monkeypatch.setattr(kernels, "num_processors", lambda device: num_processors)
    assert MAX_ROWS < 17 * 5
    for case in (
        random_case(17, (70, 3), 5, 1, D=D, S=TILE * 2),
        random_case(1, (0, 37, 300), 6, 2, D=D, S=TILE * 6),
    ):
        assert error_of(KERNELS["triton"], *case) < 1


def forgets_rules(q_BTHD, keys_BKSD, values_BKSD, lengths_B, rule_TT):
    return attend_masked(q_BTHD, keys_BKSD, values_BKSD, lengths_B)


def test_a_wrong_backend_fails_the_test_of_every_boot():
    attention_backends.check_backend(attend_masked, CPU, torch.float32, CONFIG)
    for wrong in (forgets_rules, lambda *inputs: attend_masked(*inputs) / 0):
        with pytest.raises(AssertionError, match="not close"):
            attention_backends.check_backend(wrong, CPU, torch.float32, CONFIG)


def test_lengths_on_the_host_go_to_the_other_path():
    calls = []

    def spy(q_BTHD, *rest):
        calls.append(q_BTHD.shape[1])
        return attend_masked(q_BTHD, *rest)

    attend = GpuAttention(spy)
    for T, on_device in ((1, True), (LONGEST_BLOCK, True), (4, False)):
        q, k, v, lengths = random_case(T, (30, 3))
        got = attend(q, k, v, lengths, None, torch.tensor(lengths) if on_device else None)
        assert (got - attend_math(q, k, v, lengths)).abs().max() < 3e-6
    assert calls == [1, LONGEST_BLOCK]


def absent():
    raise NotImplementedError("range must be a power of 2")


def right():
    return attend_masked


def wrong():
    return lambda q, *rest: q


@pytest.mark.parametrize(
    ("wanted", "make", "chosen"),
    [
        ("auto", right, "triton"),
        ("auto", absent, "math"),
        ("auto", wrong, "math"),
        ("flash", right, "flash"),
        ("flash", absent, "attention=flash .*range must be a power of 2.*attention=auto"),
        ("triton", wrong, "attention=triton .*attention=auto"),
    ],
)
def test_our_kernel_is_the_default_and_what_is_asked_for_works_or_is_refused(
    wanted, make, chosen, monkeypatch, caplog
):
    monkeypatch.setattr(attention_backends, "make_backend", lambda name: make())
    if chosen not in settings.BACKENDS:
        with pytest.raises(InputError, match=chosen):
            attention_backends.choose_attention(CPU, torch.float16, CONFIG, wanted=wanted)
        return
    assert (
        attention_backends.choose_attention(CPU, torch.float16, CONFIG, wanted=wanted).name
        == chosen
    )
    assert bool(caplog.records) == (chosen == "math")
    assert ("range must be a power of 2" in caplog.text) == (make is absent)


def test_grouped_queries_in_float32_reach_no_kernel_that_holds_all_scores(monkeypatch):
    """As many K and V heads as query heads in every call: those of a long prompt would not fit."""
    sdpa, calls = F.scaled_dot_product_attention, []

    def watched(q, k, v, **options):
        calls.append((q.shape[1], k.shape[1], options["enable_gqa"]))
        return sdpa(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    q, k, v, lengths = random_case(1, (70, 70), H=6, K=2, D=16)
    got = attention_backends.attend_fused(q, k, v, lengths)
    assert (got - attend_math(q, k, v, lengths)).abs().max() < 3e-6
    assert calls == [(6, 6, False)]
