"""Twins of a GPU on a CPU: lengths read on the device, a flash kernel, offloaded caches."""

from collections.abc import Iterator, Sequence
from functools import partial
from threading import local
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map

from minitri.core import runner
from minitri.core.caches.full import FullCache
from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.caches.streaming import StreamingCache
from minitri.core.decoding import sampling
from minitri.core.graphs import GraphPool
from minitri.core.model import block
from minitri.core.model.cache import BlockKV
from minitri.core.model.llama import Block, Llama
from minitri.core.offload import offloaded_cache
from minitri.core.offload.offloaded_cache import OffloadedFullCache
from minitri.core.offload.streams import HostMemory
from minitri.core.settings import LONGEST_BLOCK
from minitri.devices.gpu.attention_backends import GpuAttention, attend_flash, attend_masked
from tests.conftest import fill
from tests.core.rigs import CPU, random_prompt, tiny_config
from tests.devices.gpu_twins.recorder import Recorder

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PROMPTS = [random_prompt(tiny_config(), n, seed=n) for n in (60, 3, 21)]
UNREADABLE = -(10**9)


def flash_kernel(q_BTHD, k_BSKD, v_BSKD, *, cache_seqlens, causal):
    """What `flash_attn_with_kvcache` promises."""
    assert causal
    assert cache_seqlens.dtype == torch.int32
    slots = (k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2))
    return attend_masked(q_BTHD, *slots, cache_seqlens - q_BTHD.shape[1])


class CpuPool(GraphPool):
    """Runs functions over static buffers, as graphs; a run overwrites what all have returned."""

    here = local()  # `is_in_step`, which is there while this thread runs a step

    def __init__(self) -> None:
        super().__init__(CPU)
        self.num_graphs = 0
        self._outputs = []

    def record(self, run):
        def step():
            with patch.object(CpuPool.here, "is_in_step", True, create=True):
                return run()

        first = step()
        self.num_graphs += 1
        self._outputs += tree_leaves(first)

        def again() -> None:
            for tensor in self._outputs:
                tensor.fill_(-1 if tensor.dtype == torch.int64 else torch.nan)
            tree_map(torch.Tensor.copy_, first, step())  # where they were at capture

        return again, first


TWINS = {"math": attend_masked, "flash": partial(attend_flash, flash_kernel, attend_masked)}


@pytest.fixture
def lengths_on_the_device(monkeypatch):
    """Passes as on a GPU. While a step over static buffers runs, what the host knows of lengths is
    nonsense: a graph would have it as it was at capture."""
    monkeypatch.setattr(sampling, "gumbel_scores", sampling.dense_scores)

    def unpack_block(packed_4BT):
        slots_BT = packed_4BT[2] if packed_4BT.shape[2] <= LONGEST_BLOCK else None
        return Block(packed_4BT[0], packed_4BT[1], slots_BT)

    for module in (block, runner):
        monkeypatch.setattr(module, "unpack_block", unpack_block)
    for cls in (FullCache, RetrievalCache, StreamingCache):
        honest = cls.lengths.fget

        def lengths(self, honest=honest):
            is_in_step = hasattr(CpuPool.here, "is_in_step")
            return [UNREADABLE] * len(honest(self)) if is_in_step else honest(self)

        monkeypatch.setattr(cls, "lengths", property(lengths))


def as_on_a_gpu(model, backend=attend_masked):
    model.attend = GpuAttention(backend)
    return model


CONFIG = tiny_config(num_layers=5)
TOKEN = 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4


def offloaded(
    on_chip: int, batch_size: int = 3, capacity: int = 512, config=CONFIG
) -> OffloadedFullCache:
    model = Llama(config, dtype=torch.float32, device=CPU)
    how = {"host": HostMemory(CPU), "stream": _get_current_dispatch_mode() or MagicMock()}
    cache = OffloadedFullCache(model, batch_size, capacity, on_chip=on_chip, **how)
    how["stream"].share(cache.host_LBSPKD)  # which is lent again after a wait for all copies
    return cache


@pytest.fixture
def recorder(monkeypatch) -> Iterator[Recorder]:
    with Recorder() as recorder:
        monkeypatch.setattr(offloaded_cache, "synchronize", recorder.synchronize)
        yield recorder
    assert not recorder.num_freed_early


def assert_same(ours: OffloadedFullCache, theirs: FullCache) -> None:
    """All that is held, by every way to read it."""
    assert ours.lengths == theirs.lengths
    for b, length in enumerate(theirs.lengths):
        spans = ((0, length), (max(0, length - 9), length), (length // 2, length))
        pairs = [(ours.tokens(b, *span), theirs.tokens(b, *span)) for span in spans]
        for layers in (ours.held_layers(b), ours.layers(b)):
            for got, exact in zip(layers, theirs.layers(b), strict=True):
                pairs.append([[slots[:, :length] for slots in pair] for pair in (got, exact)])
        assert all(torch.equal(*slots) for pair in pairs for slots in zip(*pair, strict=True))


def random_block(cache: FullCache, size: int, *, has_slots: bool = False) -> BlockKV:
    """New K and V after what a cache holds, by lengths on the host or by slots on the device."""
    _, B, K, _, D = cache.keys.shape
    keys, values = cache.keys.new_empty(2, B, size, K, D).normal_()
    starts_B1 = torch.tensor(cache.lengths, device=cache.device).unsqueeze(1)
    slots_BT = starts_B1 + torch.arange(size, device=cache.device) if has_slots else None
    return BlockKV(keys, keys, values, slots_BT)


def check_blocks(ours: OffloadedFullCache, theirs: FullCache, sizes: Sequence[int]) -> None:
    """Blocks of these sizes, kept in part, after what another cache held, have the same bits."""
    theirs.keys.normal_()
    theirs.values.normal_()
    theirs.advance([280, 131])
    fill(ours, theirs)
    for number, size in enumerate(sizes):
        assert_same(ours, theirs)
        for layer in range(len(theirs.keys)):
            block = random_block(theirs, size, has_slots=number % 2 == 1 and size < LONGEST_BLOCK)
            pairs = zip(ours.update(layer, block), theirs.update(layer, block), strict=True)
            for got, exact in pairs:
                for b, length in enumerate(theirs.lengths):
                    assert torch.equal(got[b, :, : length + size], exact[b, :, : length + size])
        rejected = ((number * 7) % size, (number * 11) % size)
        for cache in (ours, theirs):
            cache.advance([size, size])
            cache.crop([length - cut for length, cut in zip(cache.lengths, rejected, strict=True)])
    assert_same(ours, theirs)
