"""Attention with lengths on the device, proven on a CPU: with plain formulas in the place of the
GPU's kernel."""

from __future__ import annotations

import pytest
import torch

from minitri.errors import InputError
from minitri.gpu import attention as gpu_attention
from minitri.gpu.attention import (
    SHORTEST_PIECE,
    FlashAttn,
    GpuAttention,
    Math,
    ShortBlock,
    TorchFlash,
    choose_backend,
    largest_error,
)
from minitri.model.attention import attend_math, fold, unfold
from minitri.settings import LONGEST_BLOCK
from tests.conftest import CPU, tiny_config
from tests.model.test_attention import random_case

CONFIG = tiny_config(num_heads=6, num_kv_heads=2, head_dim=16)


def varlen_twin(q, k, v, begins_q, begins_k, counts_k, max_q, max_k, scale):
    """What the GPU's kernel promises, sequence by sequence; for one without keys zeros and +inf, as
    it has them."""
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], q.shape[0]), torch.inf)
    for n, count in enumerate(counts_k.tolist()):
        first, last = begins_q[n : n + 2].tolist()
        assert last - first <= max_q
        assert count <= max_k
        if count:
            keys = slice(int(begins_k[n]), int(begins_k[n]) + count)
            scores = torch.einsum("qkd,skd->kqs", q[first:last], k[keys]) * scale
            out[first:last] = torch.einsum("kqs,skd->qkd", scores.softmax(-1), v[keys])
            lse[:, first:last] = scores.logsumexp(-1)
    return out, lse


def backends():
    return [Math(), *(TorchFlash(varlen_twin, num_processors=n) for n in (1, 5, 132))]


@pytest.mark.parametrize("T", [1, 2, 9, 16])
@pytest.mark.parametrize(
    "prefixes", [(0,), (1,), (100,), (0, 37, 5), (700, 0, 513), (2 * SHORTEST_PIECE, 3)]
)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_every_backend_equals_the_oracle(T, prefixes, heads):
    """MHA, GQA and MQA, ragged rows, empty rows, prefixes that end on and around the border of a
    piece, NaN behind."""
    q, k, v, lengths = random_case(T, prefixes, *heads, S=SHORTEST_PIECE * 4 + 40)
    exact = attend_math(q.double(), k.double(), v.double(), lengths)
    for backend in backends():
        got = backend(ShortBlock(q, k, v, torch.tensor(lengths)))
        assert (got - exact).abs().max() < 3e-6, backend


@pytest.mark.parametrize("T", [3, 16])
def test_a_tree_rule_replaces_causality(T):
    q, k, v, lengths = random_case(T, (20, 600), S=SHORTEST_PIECE * 3)
    rule = (
        torch.eye(T, dtype=torch.bool)
        | (torch.rand(T, T, generator=torch.Generator().manual_seed(2)) < 0.3).tril()
    )
    exact = attend_math(q, k, v, lengths, rule)
    for backend in backends():
        assert (
            backend(ShortBlock(q, k, v, torch.tensor(lengths), rule)) - exact
        ).abs().max() < 3e-6


@pytest.mark.parametrize("rows", [slice(0, 3), slice(1, 2), slice(1, 3)])
def test_a_part_of_a_cache_is_read_where_it_lies(rows):
    """Rows of one layer of a larger cache, as a prefill of one row sees them: nothing is copied,
    offsets count."""
    q, k, v, lengths = random_case(2, (40, 300, 7), S=SHORTEST_PIECE * 2)
    layers_k, layers_v = (
        torch.stack((torch.full_like(slots, torch.nan), slots)) for slots in (k, v)
    )
    exact = attend_math(q, k, v, lengths)[rows]
    for backend in backends():
        got = backend(
            ShortBlock(q[rows], layers_k[1, rows], layers_v[1, rows], torch.tensor(lengths[rows]))
        )
        assert (got - exact).abs().max() < 3e-6


def test_folding_is_undone_by_unfolding():
    q = torch.randn(2, 3, 6, 4)
    assert fold(q, 2).shape == (2, 2, 9, 4)
    assert torch.equal(unfold(fold(q, 2), 3), q)


def test_lengths_on_the_host_go_to_the_other_path():
    calls = []

    class Spy(Math):
        def __call__(self, block):
            calls.append(block.q_BTHD.shape[1])
            return super().__call__(block)

    attend = GpuAttention(Spy())
    for T, on_device in ((1, True), (LONGEST_BLOCK, True), (4, False)):
        q, k, v, lengths = random_case(T, (30, 3))
        got = attend(q, k, v, lengths, None, torch.tensor(lengths) if on_device else None)
        assert (got - attend_math(q, k, v, lengths)).abs().max() < 3e-6
    assert calls == [1, LONGEST_BLOCK]


def test_the_first_backend_that_is_right_is_chosen(monkeypatch, caplog):
    """One cannot be imported, one cannot be compiled, one computes nonsense, the last one works."""

    class CompilationError(Exception):
        pass

    def uncompiled():
        raise CompilationError("range must be a power of 2")

    def nonsense(q, *rest):
        return q, torch.zeros(q.shape[1], q.shape[0])

    made = {"flash-attn": FlashAttn, "triton": uncompiled, "math": Math}
    made["torch-flash"] = lambda: TorchFlash(nonsense, num_processors=4)
    monkeypatch.setattr(gpu_attention, "make_backend", lambda name, device: made[name]())
    caplog.set_level("INFO", "minitri")
    assert choose_backend(CPU, torch.float32, CONFIG).name == "math"
    assert "flash-attn is not used" in caplog.text
    assert "triton is not used: range must be a power of 2" in caplog.text
    assert "torch-flash is not used: it is off by" in caplog.text
    with pytest.raises(
        InputError, match="--attention torch-flash fails on cpu in torch.float32 .it is off by"
    ):
        choose_backend(CPU, torch.float32, CONFIG, wanted="torch-flash")
    made["math"] = FlashAttn
    with pytest.raises(InputError, match="no attention backend works on cpu"):
        choose_backend(CPU, torch.float32, CONFIG)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_backend_passes_its_check_in_every_dtype(dtype, monkeypatch):
    monkeypatch.setattr(gpu_attention, "make_backend", lambda name, device: Math())
    assert choose_backend(CPU, dtype, CONFIG, wanted="math").name == "math"
    assert largest_error(Math(), CPU, torch.float32, CONFIG, 3) < 1e-5
