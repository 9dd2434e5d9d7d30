"""How many kernels a commit of the retrieval cache launches at real sizes, counted on the meta
device.

An operation over a tensor whose elements lie more than 2 GB apart is split by PyTorch's
`TensorIterator`, in halves along the widest dimension, until offsets fit into 32 bits. 7B behind
122,880 tokens has 31 GB of keys, and as many of values.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minitri.caches.full import FullCache
from minitri.caches.policies import make_policy
from minitri.caches.retrieval import RetrievalCache
from minitri.settings import SpeculationConfig
from tests.conftest import tiny_config

UNSPLIT = {"aten.index_select.default"}
"""Has a kernel for wide offsets."""


def num_pieces(tensors: list[torch.Tensor]) -> int:
    """Launches of one operation over tensors of one shape, each with its strides in bytes."""
    shape = tensors[0].shape
    strides = [[stride * it.element_size() for stride in it.stride()] for it in tensors]

    def reach(sizes, of):
        return 1 + sum((size - 1) * stride for size, stride in zip(sizes, of, strict=True))

    def pieces(sizes: list[int]) -> int:
        if max(reach(sizes, of) for of in strides) < 2**31:
            return 1
        extents = [(size - 1) * max(of[i] for of in strides) for i, size in enumerate(sizes)]
        widest = extents.index(max(extents))
        half = sizes[widest] // 2
        parts = (half, sizes[widest] - half)
        return sum(pieces([*sizes[:widest], part, *sizes[widest + 1 :]]) for part in parts)

    return pieces(list(shape))


class Launches(TorchDispatchMode):
    """Counts operations that compute or copy, and the kernels that these are split into."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = self.num_launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func):
            tensors = [it for it in (*args, out) if isinstance(it, torch.Tensor) and it.dim()]
            widest = max(tensors, key=lambda it: it.dim())
            alike = [it for it in tensors if it.shape == widest.shape]
            self.num_operations += 1
            self.num_launches += 1 if str(func) in UNSPLIT else num_pieces(alike)
        return out


def count_commit(num_tokens: int) -> Launches:
    """Of so many tokens, behind a prompt of 122,880 that a chunk of means has been made of."""
    config = tiny_config(num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128)
    settings = {"dtype": torch.bfloat16, "device": torch.device("meta")}
    full = FullCache.allocate(config, 1, 122_880 + 64, **settings)
    speculation = SpeculationConfig("retrieval", budget=4096, gamma2=6)
    policy = make_policy("retrieval", full, speculation.chunk_size)
    cache = RetrievalCache(full, policy, speculation, budgets=[4096], num_heads=32)
    queries_LTHD = torch.empty(32, num_tokens, 32, 128, **settings)
    cache.rows[0].is_built, cache.rows[0].num_held = True, 4096
    for count in (122_880, num_tokens):
        full.advance([count])
        with Launches() as launches:
            if count == num_tokens:
                cache.commit(0, queries_LTHD, was_rejected=False)
            else:
                cache.observe(0, queries_LTHD[:, :1])
                cache.rows[0].num_committed = 122_880
    return launches


@pytest.mark.parametrize(("num_tokens", "most"), [(4, 8), (8, 16)])
def test_a_commit_behind_31_gb_of_keys_is_not_split(num_tokens, most, monkeypatch):
    """Of 8 tokens a new chunk has its means made. Means are 3.75 GiB themselves: two pieces. Views
    instead of copies took a launch for every second layer."""
    launches = count_commit(num_tokens)
    assert launches.num_launches <= most
    assert launches.num_launches - launches.num_operations <= 1
    monkeypatch.setattr(
        FullCache,
        "tokens",
        lambda it, b, start, end: (it.keys[:, b, :, start:end], it.values[:, b, :, start:end]),
    )
    before = count_commit(num_tokens)
    assert before.num_launches >= 2 * 16 + 16 * (num_tokens == 8)
    print(
        f"{num_tokens} tokens: {before.num_launches} launches of {before.num_operations} "
        f"operations, now {launches.num_launches} of {launches.num_operations}"
    )


@pytest.mark.parametrize(
    ("shape", "num"), [((32, 32, 122944, 128), 16), ((2, 32, 122944, 128), 1), ((7, 5), 1)]
)
def test_pieces_by_hand(shape, num):
    """A layer of these keys is 1.007 GB, so that two fit."""
    assert num_pieces([torch.empty(shape, dtype=torch.bfloat16, device="meta")]) == num
