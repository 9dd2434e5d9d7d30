"""The full cache in host memory, for texts whose KV does not fit on the device (TriForce, section
5.2).

K and V of the first `on_chip` layers stay on the device. Those of the others live in page-locked
host memory, and are copied to one of N staging buffers, at least two, before they are attended to:
while layer l computes, the next N - 1 are copied, and once a pass is over, the first N for the next
one, while others propose. Only valid tokens are copied, and what a pass adds is written back while
the computation goes on. A ring of the latest tokens stays on the device, from which the retrieval
cache takes them.

Copies to the device and copies to the host run on a stream each. Nothing waits for the whole
device. A copy waits for what was computed before it was queued: attention over its buffer, or the
block that it writes back. The computation waits until a layer is `ready` in its buffer. All blocks
must be `stored` before a stream reads host memory, and before it writes what they were copied from.
The cache holds what `FullCache` holds, to the bit.

Legend: P = 2 keys and values, L layers, B batch, S slots, K KV heads, D head dim, T new tokens.
"""

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.caches.retrieval import RetrievalCache
from minitri.config import ModelConfig
from minitri.gpu.offload.host_memory import HostMemory
from minitri.gpu.streams import CudaStreams, Streams, synchronize
from minitri.model.cache import BlockKV, round_up_to_stride, write_block

RING = 128
"""Latest tokens of every row whose K and V stay on the device."""


class StagingBuffer:
    """A place on the device for K and V of one layer."""

    def __init__(self, kv_PBKSD: Tensor, streams: Streams) -> None:
        self.kv_PBKSD = kv_PBKSD
        self.layer = -1  # whose K and V it holds; at first none
        self.num_held = [0] * kv_PBKSD.shape[1]  # tokens of each row that are here
        self.ready = streams.event()
        streams.share(kv_PBKSD)


class Staging:
    """What the rows of a cache share: host memory, buffers, streams, the ring of latest tokens."""

    def __init__(
        self, shape: tuple[int, ...], num: int, streams: Streams, host: HostMemory, like: Tensor
    ) -> None:
        """`shape` is (L, B, K, S, D) of the layers in host memory, which get `num` buffers; `like`
        has dtype and device."""
        L, B, K, S, D = shape
        self.host_PLBKSD = host.lend(self, (2, *shape), like.dtype)
        self.streams = streams
        self.stored = streams.event()
        tensors = (like.new_empty(2, B, K, S, D) for _ in range(min(L, num)))
        self.buffers = [StagingBuffer(kv_PBKSD, streams) for kv_PBKSD in tensors]
        self.ring_PLBKTD = like.new_empty(2, L, B, K, RING, D)
        self.ring_starts = [0] * B  # first token of each row that is in the ring


class OffloadedFullCache(FullCache):
    """A `FullCache` of which all but the first layers are in host memory."""

    on_layer_staged: Callable[[int, Tensor, Tensor], None] | None = None
    """Called in a pass with every layer's number, keys and values (B, K, S, D), while these are on
    the device and before anything attends to them."""

    def __init__(
        self, keys: Tensor, values: Tensor, lengths: list[int], staging: Staging, rows: slice
    ) -> None:
        """`rows` of the shared memory are this cache's."""
        super().__init__(keys, values, lengths)
        self._staging = staging
        self._rows = rows

    @classmethod
    def placed(
        cls,
        config: ModelConfig,
        batch_size: int,
        capacity: int,
        *,
        on_chip: int,
        dtype: torch.dtype,
        device: torch.device,
        num_buffers: int = 2,
        host: HostMemory | None = None,
        streams: Streams | None = None,
    ) -> "OffloadedFullCache":
        """An empty cache with `on_chip` layers on the device; `host` lends memory for others."""
        assert 0 <= on_chip < config.num_layers
        shape = (batch_size, config.num_kv_heads, round_up_to_stride(capacity), config.head_dim)
        keys, values = (torch.empty(on_chip, *shape, dtype=dtype, device=device) for _ in range(2))
        if streams is None:
            streams = CudaStreams(device) if device.type == "cuda" else Streams()
        hosted = (config.num_layers - on_chip, *shape)
        staging = Staging(hosted, num_buffers, streams, host or HostMemory(device), keys)
        return cls(keys, values, [0] * batch_size, staging, slice(0, batch_size))

    def rebuild_while_staged(self, cache: RetrievalCache, queries_LBTHD: Tensor) -> None:
        """Has a retrieval cache select from each layer while it is here; the queries are those of
        the pass under way, as far as it has come."""
        weak = weakref.proxy(cache)  # which holds this one: a cycle would keep both after the run

        def on_layer(layer: int, keys_BKSD: Tensor, values_BKSD: Tensor) -> None:
            if layer == 0:
                weak.plan_rebuild()
            weak.select(layer, queries_LBTHD[layer, :, 0], keys_BKSD, values_BKSD)

        self.on_layer_staged = on_layer
        cache.selects_in_pass = True

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        _, B, K, S, D = self.keys.shape
        return self.on_chip + self._staging.host_PLBKSD.shape[1], B, K, S, D

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values on the device and in host memory, less the staging buffers."""
        return super().num_bytes + self._staging.host_PLBKSD.nbytes

    def update(self, layer: int, block: BlockKV) -> tuple[Tensor, Tensor]:
        """See `model.cache.Cache`."""
        if layer < self.on_chip:
            on_device = super().update(layer, block)
        else:
            buffer = self._prefetch(layer)
            self._staging.stored.wait()  # what a pass wrote that was not kept is written over
            on_device = self._update_hosted(buffer, block)
        if self.on_layer_staged is not None:
            self.on_layer_staged(layer, *on_device)
        return on_device

    def _update_hosted(self, buffer: StagingBuffer, block: BlockKV) -> tuple[Tensor, Tensor]:
        """Writes a block after the prefixes in a buffer, and queues its way to host memory."""
        T = block.keys_BTKD.shape[1]
        self._check_room(T)
        buffer.ready.wait()
        keys_BKSD, values_BKSD = buffer.kv_PBKSD[:, self._rows]
        write_block(keys_BKSD, values_BKSD, block, self._lengths)
        self._write_ring(buffer.layer - self.on_chip, block)
        self._write_back(buffer, T)
        return keys_BKSD, values_BKSD

    def _write_back(self, buffer: StagingBuffer, T: int) -> None:
        """Queues the copies of the T tokens after each row's prefix to host memory."""
        staging = self._staging
        host_PBKSD = staging.host_PLBKSD[:, buffer.layer - self.on_chip]
        with staging.streams.copying("to host"):
            for b, start in self._row_lengths():
                new = slice(start, start + T)
                copy_heads(host_PBKSD[:, b, :, new], buffer.kv_PBKSD[:, b, :, new])
            staging.stored.record()

    def _write_ring(self, hosted: int, block: BlockKV) -> None:
        """Writes the block into the ring, at its positions modulo RING."""
        staging = self._staging
        T = block.keys_BTKD.shape[1]
        first = max(0, T - RING)
        latest_PBTKD = torch.stack((block.keys_BTKD[:, first:], block.values_BTKD[:, first:]))
        for row, (b, start) in enumerate(self._row_lengths()):
            places = torch.arange(start + first, start + T, device=self.device) % RING
            latest_PKTD = latest_PBTKD[:, row].transpose(1, 2)
            staging.ring_PLBKTD[:, hosted, b].index_copy_(2, places, latest_PKTD)
            if hosted == 0:
                staging.ring_starts[b] = max(min(staging.ring_starts[b], start), start + T - RING)

    def _prefetch(self, layer: int) -> StagingBuffer:
        """Queues copies of a hosted layer and the next, one for each buffer; the first's buffer."""
        buffer = self._fetch(layer)
        for number in range(layer + 1, min(layer + len(self._staging.buffers), self.shape[0])):
            self._fetch(number)
        return buffer

    def _fetch(self, layer: int) -> StagingBuffer:
        """Queues the copy of those tokens of a layer that its staging buffer lacks, if any."""
        staging = self._staging
        hosted = layer - self.on_chip
        buffer = staging.buffers[hosted % len(staging.buffers)]
        is_other = buffer.layer != layer
        if is_other:
            buffer.layer = layer
            buffer.num_held = [0] * len(buffer.num_held)
        missing = [(b, end) for b, end in self._row_lengths() if buffer.num_held[b] < end]
        if not (missing or is_other):
            return buffer
        with staging.streams.copying("to device"):
            staging.stored.wait()
            for b, end in missing:
                old = slice(buffer.num_held[b], end)
                host_PKTD = staging.host_PLBKSD[:, hosted, b, :, old]
                copy_heads(buffer.kv_PBKSD[:, b, :, old], host_PKTD)
                buffer.num_held[b] = end
            buffer.ready.record()
        return buffer

    def layers(self, b: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.keys[:, b], self.values[:, b], strict=True)
        row = self.row(b)  # so that no other row's KV travels
        for layer in range(self.on_chip, self.shape[0]):
            buffer = row._prefetch(layer)
            buffer.ready.wait()
            keys_KSD, values_KSD = buffer.kv_PBKSD[:, row._rows.start]
            yield keys_KSD, values_KSD
        self._prefetch(self.on_chip)

    def tokens(self, b: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        keys_LKTD, values_LKTD = super().tokens(b, start, end)
        staging = self._staging
        b = b + self._rows.start
        if start >= staging.ring_starts[b]:
            places = torch.arange(start, end, device=self.device) % RING
            hosted_PLKTD = staging.ring_PLBKTD[:, :, b].index_select(3, places)
        else:
            staging.stored.wait()
            host_PLKTD = staging.host_PLBKSD[:, :, b, :, start:end]
            hosted_PLKTD = torch.empty(host_PLKTD.shape, dtype=self.dtype, device=self.device)
            copy_heads(hosted_PLKTD, host_PLKTD)
        return torch.cat((keys_LKTD, hosted_PLKTD[0])), torch.cat((values_LKTD, hosted_PLKTD[1]))

    def held_layers(self, b: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.keys[:, b], self.values[:, b], strict=True)
        synchronize(self.device)
        yield from zip(*self._staging.host_PLBKSD[:, :, b], strict=True)

    def write(self, layer: int, b: int, keys_KTD: Tensor, values_KTD: Tensor) -> None:
        if layer < self.on_chip:
            super().write(layer, b, keys_KTD, values_KTD)
            return
        synchronize(self.device)
        host_PKTD = self._staging.host_PLBKSD[:, layer - self.on_chip, b, :, : keys_KTD.shape[1]]
        for host_KTD, new_KTD in zip(host_PKTD, (keys_KTD, values_KTD), strict=True):
            host_KTD.copy_(new_KTD)
        self._staging.ring_starts[b] = keys_KTD.shape[1]  # none of these tokens is in the ring

    def restore(self, b: int, num_tokens: int) -> None:
        super().restore(b, num_tokens)
        self._staging.ring_starts[b] = num_tokens  # none of these tokens is in the ring

    def row(self, b: int) -> "OffloadedFullCache":
        return OffloadedFullCache(*self.parts(b, self._lengths[b]))

    def parts(self, b: int, length: int) -> tuple[Tensor, Tensor, list[int], Staging, slice]:
        """The arguments that make a cache of row b alone, which holds `length` tokens."""
        here = slice(b, b + 1)
        shared = self._rows.start + b
        rows = slice(shared, shared + 1)
        return self.keys[:, here], self.values[:, here], [length], self._staging, rows

    def advance(self, counts: list[int]) -> None:
        super().advance(counts)
        self._prefetch(self.on_chip)

    def keep_path(self, b: int, path: list[int]) -> None:
        super().keep_path(b, path)
        staging = self._staging
        start = self._lengths[b]
        row = self._rows.start + b
        end = start + 1 + len(path)
        old = torch.tensor([start + place for place in path]).to(self.device) % RING
        new = torch.arange(start + 1, end, device=self.device) % RING
        ring_PLKTD = staging.ring_PLBKTD[:, :, row]
        kept_PLKTD = ring_PLKTD.index_select(3, old)
        ring_PLKTD.index_copy_(3, new, kept_PLKTD)
        staging.streams.share(kept_PLKTD)
        with staging.streams.copying("to host"):
            copy_heads(staging.host_PLBKSD[:, :, row, :, start + 1 : end], kept_PLKTD)
            staging.stored.record()
        for buffer in staging.buffers:
            buffer.num_held[row] = min(buffer.num_held[row], start)

    def _set_lengths(self, lengths: list[int]) -> None:
        super()._set_lengths(lengths)
        for b, length in self._row_lengths():
            for buffer in self._staging.buffers:
                buffer.num_held[b] = min(buffer.num_held[b], length)

    def _row_lengths(self) -> Iterator[tuple[int, int]]:
        """Each row's number in the shared memory, and its length."""
        return zip(range(self._rows.start, self._rows.stop), self._lengths, strict=True)


def copy_heads(target: Tensor, source: Tensor) -> None:
    """Copies (..., T, D) without waiting, head by head: between host and device, what is not
    contiguous would go through a contiguous clone."""
    if target.dim() > 2:
        for target_part, source_part in zip(target, source, strict=True):
            copy_heads(target_part, source_part)
    elif len(target):
        target.copy_(source, non_blocking=True)
