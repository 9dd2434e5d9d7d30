"""Every backend for short blocks equals the oracle. On a CPU Triton's interpreter runs ours, and
FlashAttention has a stand-in."""

from contextlib import suppress
from functools import partial
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.nn.functional as F

from minitri.core.errors import InputError
from minitri.core.model.attention import attend_math
from minitri.devices.cpu.kernels import load_kernels
from minitri.devices.gpu import attention_backends
from minitri.devices.gpu.attention_backends import (
    TOLERANCES,
    attend_flash,
    attend_masked,
    choose_attention,
)
from tests.core.rigs import CPU, tiny_config
from tests.devices.gpu_twins.conftest import DEVICE, ON_GPU, TWINS
from tests.devices.test_attention import oracle, random_case, random_mask

D = 64 if ON_GPU else 16
TILE = 16
BACKENDS = dict(TWINS)
with suppress(ImportError):
    from minitri.devices.gpu.kernels import flash_decoding

    BACKENDS["triton"] = flash_decoding.attend_short_block
ours = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
needs_triton = pytest.mark.skipif("triton" not in BACKENDS, reason="needs triton, made for Linux")


def error_of(backend, q, keys, values, lengths, rows=slice(None), mask=None) -> float:
    """The largest one of these rows, as a share of what rounding explains."""
    if ON_GPU and getattr(backend, "func", None) is attend_flash:
        q, keys, values = q.bfloat16(), keys.bfloat16(), values.bfloat16()
    exact = oracle(q, keys, values, lengths, mask)[rows]
    q, keys, values = (tensor.to(DEVICE)[rows] for tensor in (q, keys, values))
    lengths_B = torch.tensor(lengths, device=DEVICE)[rows]
    got = backend(q, keys, values, lengths_B, None if mask is None else mask.to(DEVICE))
    error = float((got.double().cpu() - exact).abs().max().nan_to_num(torch.inf))
    return error / (TOLERANCES[q.dtype] if ON_GPU else 3e-6)


@ours
@pytest.mark.parametrize(
    ("T", "heads", "prefixes", "D"),
    [
        (1, (2, 2), (0, TILE - 1, 90), D),
        (3, (6, 2), (TILE - 3, 2 * TILE), D),
        (7, (5, 1), (TILE + 5,), D),
        (3, (4, 2), (TILE + 5,), 5 * D // 4),
    ],
)
@pytest.mark.parametrize("is_tree", [False, True])
def test_every_backend_equals_the_oracle(is_tree, T, heads, prefixes, D, backend):
    """Ragged rows, texts that end around the border of a tile, more rows than one; NaN after. Of
    larger tensors a part is read where it lies, of trees tokens first as in a staging buffer. Heads
    need not be a power of two."""
    q, *slots, lengths = random_case(T, (9, *prefixes), *heads, D=D)
    q = torch.cat((q * torch.nan, q), 2)[:, :, heads[0] :]
    keys, values = (torch.cat((it, it * torch.nan), 1)[:, : heads[1]] for it in slots)
    if is_tree:
        kv_BSPKD = torch.stack((keys, values), 2).transpose(1, 3).contiguous()
        keys, values = kv_BSPKD.transpose(1, 3).unbind(2)
    case = (q, keys, values, lengths)
    mask = random_mask(T) if is_tree else None
    assert error_of(backend, *case, slice(1, None), mask) < 1
    if is_tree and T > 1:
        assert (attend_math(*case, mask) - attend_math(*case)).abs().max() > 1e-3


@needs_triton
@pytest.mark.parametrize("num_processors", [9, 20])
def test_a_prefix_is_cut_in_as_many_pieces_as_there_are_processors(num_processors, monkeypatch):
    """There may be more of them than tiles of keys. Queries are more than a tile, and the first of
    them see nothing of the last piece."""
    monkeypatch.setattr(flash_decoding, "num_processors", lambda device: num_processors)
    case = random_case(7, (4 * TILE - 4,), 10, 2, D=D)
    assert error_of(attention_backends.make_backend("triton"), *case) < 1


def test_a_kernel_that_is_wrong_gives_way_by_default_and_is_refused_where_it_was_asked_for(
    monkeypatch, caplog
):
    choose = partial(choose_attention, CPU, torch.float16, tiny_config(head_dim=20))
    without_masks = lambda *inputs: attend_masked(*inputs[:4])  # noqa: E731
    for number, (backend, name) in enumerate(((attend_masked, "triton"), (without_masks, "math"))):
        monkeypatch.setattr(attention_backends, "make_backend", lambda name, made=backend: made)
        assert choose().name == name
        assert len(caplog.records) == number
    with pytest.raises(InputError, match="attention=triton .*attention=auto"):
        choose(wanted="triton")


def long_flash_kernel(q_BHTD, k_BKSD, v_BKSD, *, is_causal):
    """What `aten._scaled_dot_product_flash_attention` promises: it is causal at the last slot."""
    assert is_causal
    assert q_BHTD.shape[3] % 8 == 0
    assert q_BHTD.dtype == torch.float16
    num_before = k_BKSD.shape[2] - q_BHTD.shape[2]
    return [attend_math(q_BHTD.transpose(1, 2), k_BKSD, v_BKSD, [num_before]).transpose(1, 2)]


@pytest.mark.parametrize("prefix", [0, 70])
def test_long_blocks_reach_the_flash_kernel_or_the_backend_in_pieces(prefix, monkeypatch):
    """No mask is made, and PyTorch chooses nothing."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", Mock(side_effect=AssertionError))
    aten = torch.ops.aten
    if not ON_GPU:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(aten, "_scaled_dot_product_flash_attention", long_flash_kernel)
    for dtype, D in ((torch.float16, 16), (torch.float16, 20), (torch.float32, 16)):
        *tensors, lengths = random_case(300, (prefix,), H=6, K=2, D=D, dtype=dtype)
        got = attention_backends.GpuAttention()(*(it.to(DEVICE) for it in tensors), lengths)
        assert (got.cpu() - oracle(*tensors, lengths)).abs().max() < TOLERANCES[dtype]


@needs_triton
def test_a_long_row_among_short_ones_is_read_by_several_programs(monkeypatch):
    for name in ("attend_piece", "merge_pieces"):
        monkeypatch.setattr(flash_decoding, name, MagicMock())
    q, *slots, lengths = random_case(1, (4096, 3, 3), H=8, K=8)
    flash_decoding.attend_short_block(q, *slots, torch.tensor(lengths))
    assert flash_decoding.attend_piece.__getitem__.call_args.args == ((1, 8, 24),)


FAR = {  # prefixes, and strides of rows, heads and slots: of six rows of a real size, or of heads
    "rows": ((0, 3, 70, 1, 17, 66), 32 * 122_880 * 128, 31 * 122_880 * 128, 128),
    "slots": ((36,), 128, 128, 1 << 26),
}


@needs_triton
@pytest.mark.skipif(ON_GPU, reason="sparse memory is the host's")
@pytest.mark.parametrize("where", FAR)
def test_kernels_reach_rows_and_slots_that_are_far_apart(where, tmp_path):
    """They begin after 2^31 numbers, in the middle of the memory of a sparse file: a wrong
    offset finds zeros, not a fault."""
    prefixes, *strides = FAR[where]
    q, *near, lengths = random_case(2, prefixes, 4, 2, 128, S=80, dtype=torch.float16)
    make = partial(torch.from_file, shared=True, size=3 << 33, dtype=torch.float16)
    far = [make(str(tmp_path / name))[1 << 33 :] for name in ("keys", "values")]
    far = [it.as_strided(near[0].shape, (*strides, 1)) for it in far]
    for file in tmp_path.iterdir():
        file.unlink()
    for ours, theirs in zip(far, near, strict=True):
        ours.copy_(theirs)
    found = [flash_decoding.attend_short_block(q, *far, torch.tensor(lengths))]
    if where == "rows" and (compiled := load_kernels()) is not None:
        found.append(compiled.attend(q, *far, lengths))
    for got in found:
        assert (got.double() - oracle(q, *near, lengths)).abs().max() < 3e-3
