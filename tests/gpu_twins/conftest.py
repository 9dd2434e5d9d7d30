"""Twins of a GPU on a CPU: lengths that are read on the device, and a packed flash kernel."""

from functools import partial

import pytest
import torch

from minitri.caches.full import FullCache
from minitri.caches.retrieval import RetrievalCache
from minitri.caches.streaming import StreamingCache
from minitri.decoding import noise
from minitri.gpu.attention_backends import GpuAttention, attend_flash, attend_masked, torch_flash
from minitri.gpu.graphs import GraphPool
from minitri.model import block as block_module
from minitri.settings import LONGEST_BLOCK
from tests.gpu_twins.capture_lint import as_kernel

UNREADABLE = -(10**9)


def packed_flash(
    q_QHD, k, v, begins_q, begins_k, max_q, max_k, dropout, is_causal, is_debug, *, seqused_k
):
    """What `aten::_flash_attention_forward` promises, sequence by sequence."""
    assert (dropout, is_causal, is_debug) == (0.0, True, False)
    assert begins_q.dtype == begins_k.dtype == seqused_k.dtype == torch.int32
    out, num_groups = torch.zeros_like(q_QHD), q_QHD.shape[1] // k.shape[1]
    firsts_q, firsts_k = begins_q.tolist(), begins_k.tolist()
    for n, count in enumerate(seqused_k.tolist()):
        first, last = firsts_q[n : n + 2]
        assert last - first == max_q
        assert count <= max_k
        here = slice(firsts_k[n], firsts_k[n] + count)
        keys, values = (
            it[here].unsqueeze(2).expand(-1, -1, num_groups, -1).flatten(1, 2) for it in (k, v)
        )
        scores = torch.einsum("qhd,shd->hqs", q_QHD[first:last], keys) * q_QHD.shape[2] ** -0.5
        unseen = torch.ones_like(scores[0], dtype=torch.bool).triu(count - max_q + 1)
        scores = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        out[first:last] = torch.einsum("hqs,shd->qhd", scores, values)
    return out, None


@pytest.fixture(autouse=True)
def flash_on_a_cpu(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", as_kernel(packed_flash))


TWINS = {"math": attend_masked, "flash": partial(attend_flash, torch_flash)}
"""Backends that need no compiler."""


@pytest.fixture
def lengths_on_the_device(monkeypatch):
    """Passes as on a GPU. While a step over static buffers runs, what the host knows of lengths is
    nonsense: a graph would have it as it was at capture."""
    in_step = []
    monkeypatch.setattr(noise, "gumbel_scores", noise._dense_scores)
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
