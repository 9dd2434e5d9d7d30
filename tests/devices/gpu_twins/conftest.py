"""Twins of a GPU on a CPU: lengths that are read on the device, and a flash kernel."""

from functools import partial

import pytest
import torch

from minitri.core.caches.full import FullCache
from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.caches.streaming import StreamingCache
from minitri.core.decoding import noise
from minitri.core.graphs import GraphPool
from minitri.core.model import block as block_module
from minitri.core.settings import LONGEST_BLOCK
from minitri.devices.gpu.attention_backends import GpuAttention, attend_flash, attend_masked
from tests.core.rigs import random_prompt, tiny_config

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PROMPTS = [random_prompt(tiny_config(), n, seed=n) for n in (60, 3, 21)]
SMALL = {"budget": 24, "num_recent_tokens": 60, "gamma1": 2, "gamma2": 3}
UNREADABLE = -(10**9)


def flash_kernel(q_BTHD, k_BSKD, v_BSKD, *, cache_seqlens, causal):
    """What `flash_attn_with_kvcache` promises."""
    assert causal
    assert cache_seqlens.dtype == torch.int32
    slots = (k_BSKD.transpose(1, 2), v_BSKD.transpose(1, 2))
    return attend_masked(q_BTHD, *slots, cache_seqlens - q_BTHD.shape[1])


TWINS = {"math": attend_masked, "flash": partial(attend_flash, flash_kernel, attend_masked)}
"""Backends that need no compiler."""


@pytest.fixture
def lengths_on_the_device(monkeypatch):
    """Passes as on a GPU. While a step over static buffers runs, what the host knows of lengths is
    nonsense: a graph would have it as it was at capture."""
    in_step = []
    monkeypatch.setattr(noise, "gumbel_scores", noise.dense_scores)
    monkeypatch.setattr(block_module, "reads_slots", lambda device, size: size <= LONGEST_BLOCK)
    for cls in (FullCache, RetrievalCache, StreamingCache):
        honest = cls.lengths.fget

        def lengths(self, honest=honest):
            return [UNREADABLE] * len(honest(self)) if in_step else honest(self)

        monkeypatch.setattr(cls, "lengths", property(lengths))
    capture = GraphPool.capture

    def capture_and_watch(pool, step, *examples):
        def watched(*inputs):
            in_step.append(True)
            try:
                return step(*inputs)
            finally:
                in_step.pop()

        return capture(pool, watched, *examples)

    monkeypatch.setattr(GraphPool, "capture", capture_and_watch)


def as_on_a_gpu(model, backend=attend_masked):
    model.attend = GpuAttention(backend)
    return model
