"""The full cache in host memory, for K and V that do not fit on the device (TriForce, 5.2).

K and V of the first `on_chip` layers stay on the device. Those of the others are in page-locked
host memory, and are copied to one of two staging buffers: while layer l computes, layer l + 1 is
copied; after a pass, the first two layers of the next one, while the lower stages propose. New K
and V are copied to the host meanwhile, and stay on the device until the next pass.

All copies run on one stream, each after the work that was queued before it. The computation waits
until a buffer is `ready`: its layer has arrived, and so have earlier copies to the host.
Legend: P = 2 (K and V), L layers, B batch, S slots, K KV heads, D head dim, T new tokens.
"""

import functools
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from minitri.core.caches.full import FullCache
from minitri.core.caches.retrieval import RetrievalCache
from minitri.core.model.cache import KV, BlockKV, gather_path, write_block
from minitri.core.model.llama import Llama
from minitri.core.offload.streams import CopyStream, HostMemory, synchronize
from minitri.core.settings import LONGEST_BLOCK, pad_to_stride


class StagingBuffer:
    """Device buffer for K and V of one layer at a time, of the layers in host memory."""

    def __init__(self, kv_BSPKD: Tensor, stream: CopyStream) -> None:
        self.kv_BSPKD = kv_BSPKD
        self.layer = -1  # index of the layer in the buffer; -1: none yet
        self.num_held = [0] * len(kv_BSPKD)  # tokens of each row in the buffer
        self.ready = stream.event()
        stream.share(kv_BSPKD)


class OffloadedFullCache(FullCache):
    """KV cache of all tokens; layers from `on_chip` on are in host memory, copied when needed."""

    is_hosted = True

    def __init__(
        self,
        model: Llama,
        batch_size: int,
        capacity: int,
        *,
        on_chip: int,
        host: HostMemory,
        stream: CopyStream | None = None,
    ) -> None:
        B, K, D = batch_size, model.config.num_kv_heads, model.config.head_dim
        L = model.config.num_layers - on_chip
        S = pad_to_stride(capacity)
        empty = functools.partial(torch.empty, dtype=model.dtype, device=model.device)
        super().__init__(empty(on_chip, B, K, S, D), empty(on_chip, B, K, S, D))
        self.host_LBSPKD = host.lend(self, (L, B, S, 2, K, D), model.dtype)
        self.stream = stream or CopyStream(model.device)
        buffers = (empty(B, S, 2, K, D) for _ in range(min(L, 2)))
        self.buffers = [StagingBuffer(kv_BSPKD, self.stream) for kv_BSPKD in buffers]
        self.latest_LBTPKD = empty(L, B, LONGEST_BLOCK, 2, K, D)
        self.stream.share(self.latest_LBTPKD)
        self.latest_starts = [S] * B  # first token of each row in `latest_LBTPKD`; S: none
        self._subscribers = weakref.WeakSet[RetrievalCache]()

    def subscribe(self, cache: RetrievalCache | None) -> None:
        """Makes `update` call `cache.select` with each layer's K and V; None: no longer."""
        # A cycle of strong references would keep both after the run.
        self._subscribers = weakref.WeakSet([cache] if cache else [])

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.host_LBSPKD.nbytes

    def update(self, layer: int, block: BlockKV) -> KV:
        if layer < self.on_chip:
            on_device = super().update(layer, block)
        else:
            on_device = self.update_hosted(
                self._prefetch(layer), block, dict(enumerate(self.lengths))
            )
        for cache in self._subscribers:
            cache.select(layer, *on_device)
        return on_device

    def update_hosted(self, buffer: StagingBuffer, block: BlockKV, starts: dict[int, int]) -> KV:
        """Writes a block's K and V into `buffer`, of row b from slot `starts[b]` on; queues copies
        to the host. Returns the buffer's keys and values (R, K, S, D) of the R rows in `starts`."""
        T = block.keys_BTKD.shape[1]
        buffer.ready.wait()
        kv_BSPKD = buffer.kv_BSPKD[min(starts) : max(starts) + 1]
        keys_BKSD, values_BKSD = kv_BSPKD.transpose(1, 3).unbind(2)
        write_block(keys_BKSD, values_BKSD, block, [*starts.values()])
        hosted = buffer.layer - self.on_chip
        for b, start in starts.items():
            end = start + T
            first = max(start, end - LONGEST_BLOCK)
            self.latest_starts[b] = first
            self.latest_LBTPKD[hosted, b, : end - first] = buffer.kv_BSPKD[b, first:end]
            with self.stream.copying():
                host_TPKD = self.host_LBSPKD[hosted, b, start:end]
                host_TPKD.copy_(buffer.kv_BSPKD[b, start:end], non_blocking=True)
        return keys_BKSD, values_BKSD

    def _prefetch(self, layer: int) -> StagingBuffer:
        """Queues copies of a layer and the next from host to device; returns the layer's buffer."""
        ends = dict(enumerate(self.lengths))
        buffer = self.fetch(layer, ends)
        if layer + 1 < self.on_chip + len(self.host_LBSPKD):
            self.fetch(layer + 1, ends)
        return buffer

    def fetch(self, layer: int, ends: dict[int, int]) -> StagingBuffer:
        """Queues copies of K and V of row b's first `ends[b]` tokens from the host to the staging
        buffer of a layer, but for those that are there; returns the buffer."""
        hosted = layer - self.on_chip
        buffer = self.buffers[hosted % len(self.buffers)]
        if buffer.layer != layer:
            buffer.layer = layer
            buffer.num_held = [0] * len(buffer.num_held)
        with self.stream.copying():
            for b, end in ends.items():
                missing = slice(buffer.num_held[b], end)
                host_TPKD = self.host_LBSPKD[hosted, b, missing]
                buffer.kv_BSPKD[b, missing].copy_(host_TPKD, non_blocking=True)
                buffer.num_held[b] = max(buffer.num_held[b], end)
            buffer.ready.record()
        return buffer

    def layers(self, b: int) -> Iterator[KV]:
        end = self.lengths[b]
        for keys_KSD, values_KSD in self.held_layers(b):
            yield keys_KSD[:, :end].to(self.device), values_KSD[:, :end].to(self.device)

    def tokens(self, b: int, start: int, end: int) -> KV:
        keys_LKTD, values_LKTD = super().tokens(b, start, end)
        first = start - self.latest_starts[b]
        if first >= 0:
            hosted_LTPKD = self.latest_LBTPKD[:, b, first : first + end - start]
        else:
            synchronize(self.device)
            hosted_LTPKD = self.host_LBSPKD[:, b, start:end].to(self.device)
        keys, values = hosted_LTPKD.transpose(1, 3).unbind(2)
        return torch.cat((keys_LKTD, keys)), torch.cat((values_LKTD, values))

    def held_layers(self, b: int) -> Iterator[KV]:
        yield from super().layers(b)
        synchronize(self.device)
        yield from zip(*self.host_LBSPKD[:, b].transpose(1, 3).unbind(2), strict=True)

    def write(self, layer: int, b: int, keys_KTD: Tensor, values_KTD: Tensor) -> None:
        if layer < self.on_chip:
            super().write(layer, b, keys_KTD, values_KTD)
            return
        synchronize(self.device)
        new_TPKD = torch.stack((keys_KTD, values_KTD), 1).transpose(0, 2)
        self.host_LBSPKD[layer - self.on_chip, b, : len(new_TPKD)] = new_TPKD
        self.latest_starts[b] = self.capacity

    def restore(self, b: int, num_tokens: int) -> None:
        super().restore(b, num_tokens)
        self.latest_starts[b] = num_tokens

    def row(self, b: int) -> "HostedRow":  # type: ignore[override]  # no other kind is made
        return HostedRow(self, b, self.lengths[b])

    def advance(self, counts: list[int]) -> None:
        super().advance(counts)
        self._prefetch(self.on_chip)

    def keep_path(self, b: int, path: list[int]) -> None:
        super().keep_path(b, path)
        for slots_LBKTD in self.latest_LBTPKD.transpose(2, 4).unbind(3):
            gather_path(slots_LBKTD, b, 0, path)
        start = self.lengths[b] + 1
        with self.stream.copying():
            for host_BSPKD, latest_BTPKD in zip(self.host_LBSPKD, self.latest_LBTPKD, strict=True):
                kept_TPKD = latest_BTPKD[b, 1 : 1 + len(path)]
                host_BSPKD[b, start : start + len(path)].copy_(kept_TPKD, non_blocking=True)

    def hold(self, b: int, num_slots: int, num_tokens: int) -> None:
        super().hold(b, num_slots, num_tokens)
        for buffer in self.buffers:
            buffer.num_held[b] = min(buffer.num_held[b], num_slots)


class HostedRow(FullCache):
    """One row of an offloaded cache while its prompt is read layer by layer: each layer reads all
    chunks of the prompt, whose K and V stay in its staging buffer, before the next layer begins."""

    is_hosted = True

    def __init__(self, full: OffloadedFullCache, b: int, length: int) -> None:
        super().__init__(full.keys[:, b : b + 1], full.values[:, b : b + 1])
        self.restore(0, length)
        self._full = full
        self._b = b

    def update(self, layer: int, block: BlockKV) -> KV:
        if layer < self.on_chip:
            return super().update(layer, block)
        here = {self._b: self.lengths[0]}
        buffer = self._full.fetch(layer, here)
        on_device = self._full.update_hosted(buffer, block, here)
        buffer.num_held[self._b] = self.lengths[0] + block.keys_BTKD.shape[1]
        return on_device
