"""Attention with lengths on the device, proven on a CPU: with plain formulas in the place of the
GPU's kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minitri.errors import InputError
from minitri.gpu import backend_choice
from minitri.gpu.attention import (
    SHORTEST_PIECE,
    FlashAttn,
    GpuAttention,
    Math,
    ShortBlock,
    TorchFlash,
    attend_fused,
)
from minitri.gpu.backend_choice import choose_backend, largest_error
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


def test_backends_that_are_absent_broken_or_wrong_are_not_chosen(monkeypatch, caplog):
    """One cannot be imported, one cannot be compiled, one computes nonsense, the last one works."""

    class CompilationError(Exception):
        pass

    def uncompiled():
        raise CompilationError("range must be a power of 2")

    def nonsense(q, *rest):
        return q, torch.zeros(q.shape[1], q.shape[0])

    made = {"flash-attn": FlashAttn, "triton": uncompiled, "math": Math}
    made["torch-flash"] = lambda: TorchFlash(nonsense, num_processors=4)
    monkeypatch.setattr(backend_choice, "make_backend", lambda name, device: made[name]())
    caplog.set_level("INFO", "minitri")
    assert choose_backend(CPU, torch.float16, CONFIG).name == "math"
    levels = {record.levelname: record.getMessage() for record in caplog.records}
    assert "flash-attn is not used on cpu: No module named 'flash_attn'" in levels["INFO"]
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "triton is not used on cpu: range must be a power of 2" in warned[0]
    assert "torch-flash is not used on cpu: it is off by" in warned[1]
    assert "falls back to plain formulas" in warned[2]
    with pytest.raises(
        InputError, match="--attention torch-flash fails on cpu in torch.float16 .it is off by"
    ):
        choose_backend(CPU, torch.float16, CONFIG, wanted="torch-flash")
    made["math"] = FlashAttn
    with pytest.raises(InputError, match="no attention backend works on cpu"):
        choose_backend(CPU, torch.float16, CONFIG)


def test_those_that_know_no_float32_are_not_tried_in_it(monkeypatch, caplog):
    tried = []

    def make(name, device):
        tried.append(name)
        return Math()

    monkeypatch.setattr(backend_choice, "make_backend", make)
    choose_backend(CPU, torch.float32, CONFIG)
    assert tried == ["triton"]
    assert not caplog.records


def test_the_fastest_of_the_right_backends_is_chosen(monkeypatch, caplog):
    """By the clock of the device, on K and V that fit into no cache."""
    made = {name: Math() for name in ("flash-attn", "triton", "torch-flash")}
    for name, backend in made.items():
        backend.name = name
    monkeypatch.setattr(backend_choice, "make_backend", lambda name, device: made[name])
    monkeypatch.setattr(backend_choice, "TIMED_BYTES", 1 << 16)
    times = iter([0.5, 0.3, 0.4])
    seen = []

    def milliseconds(work):
        seen.append(work.args[0])
        assert work().isfinite().all()
        return next(times)

    monkeypatch.setattr(backend_choice, "milliseconds", milliseconds)
    caplog.set_level("INFO", "minitri")
    assert choose_backend(CPU, torch.float16, CONFIG).name == "triton"
    assert "attention triton takes 0.300 ms for a token behind" in caplog.text
    for block in seen:
        assert block.keys_BKSD.nbytes + block.values_BKSD.nbytes == 1 << 16
        assert int(block.lengths_B) == block.keys_BKSD.shape[2] - 1


def test_grouped_queries_in_float32_reach_no_kernel_that_holds_all_scores(monkeypatch):
    """As many K and V heads as query heads in every call, which a fused kernel takes."""
    sdpa, calls = F.scaled_dot_product_attention, []

    def watched(q, k, v, **options):
        calls.append((q.shape[1], k.shape[1], options["enable_gqa"]))
        return sdpa(q, k, v, **options)

    for T in (9, 1):  # without a mask, which knows the function by its name
        q, k, v, lengths = random_case(T, (70, 70), H=6, K=2, D=16)
        if T == 1:
            monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
        got = attend_fused(q, k, v, lengths)
        assert (got - attend_math(q, k, v, lengths)).abs().max() < 3e-6
    assert calls == [(2, 2, False)] * 3


def test_a_chunk_of_a_long_prompt_in_float32_never_holds_all_scores(monkeypatch):
    """What PyTorch would allocate on a GPU for 1,024 tokens behind 121,856 of a model with grouped
    queries, on the meta device: its choice of a kernel, by the rules of the CUDA build, and the
    real shapes of everything that comes of it."""
    from torch.nn.attention import bias

    def is_efficient(params):  # what the kernel takes in float32: as many heads of K and V
        return not params.enable_gqa and params.query.shape[1] == params.key.shape[1]

    class Largest(TorchDispatchMode):
        numbers, kernels = 0, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.kernels += func is torch.ops.aten._efficient_attention_forward.default
            made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            held = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if
                    isinstance(x, torch.Tensor)}  # fmt: skip
            fresh = [x.numel() for x in made if x.untyped_storage()._cdata not in held]
            self.numbers = max([self.numbers, *fresh])
            return out

    monkeypatch.setattr(bias, "can_use_flash_attention", lambda params: False)
    monkeypatch.setattr(bias, "can_use_efficient_attention", is_efficient)
    monkeypatch.setattr(bias, "_raise_kernel_warnings", lambda params: None)
    T, end, H, K, D = 1024, 122_880, 32, 8, 128
    q = torch.empty(1, T, H, D, device="meta")
    keys, values = (torch.empty(1, K, end, D, device="meta") for _ in range(2))
    mask = bias.causal_lower_right(T, end)  # which cannot be made while a mode watches
    monkeypatch.setattr(
        bias, "causal_lower_right", lambda *size: mask if size == (T, end) else None
    )
    with Largest() as largest:
        out = attend_fused(q, keys, values, [end - T])
    assert out.shape == q.shape
    assert largest.kernels == H // K
    assert largest.numbers <= q.numel()
    assert q.numel() * 4 < T * end  # not even the scores of one head


@pytest.mark.parametrize("num_processors", [4, 7])
def test_pieces_of_a_prefix_make_one_wave(num_processors):
    """Of two programs for each multiprocessor."""
    counts = []

    def kernel(q, k, v, begins_q, begins_k, counts_k, *rest):
        counts.append(len(counts_k))
        return varlen_twin(q, k, v, begins_q, begins_k, counts_k, *rest)

    q, k, v, lengths = random_case(2, (4000,), H=6, K=3, D=16, S=8192)
    block = ShortBlock(q, k, v, torch.tensor(lengths))
    TorchFlash(kernel, num_processors=num_processors)(block)
    assert counts[0] * 3 <= 2 * num_processors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_backend_passes_its_check_in_every_dtype(dtype, monkeypatch):
    monkeypatch.setattr(backend_choice, "make_backend", lambda name, device: Math())
    assert choose_backend(CPU, dtype, CONFIG, wanted="math").name == "math"
    assert largest_error(Math(), CPU, torch.float32, CONFIG, 3) < 1e-5
