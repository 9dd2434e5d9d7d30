"""The full cache in host memory, for texts whose KV does not fit on the device (TriForce, section
5.2).

K and V of the first `on_chip` layers stay on the device. Those of the others live in page-locked
host memory, and are copied to one of N staging buffers, at least two, before they are attended to:
while layer l computes, the next N - 1 are copied, and once a pass is over, the first N for the next
one, while others guess. Only valid tokens are copied, and what a pass adds is written back behind
the computation. A ring of the latest tokens stays on the device, from which the retrieval cache
takes them.

Copies to the device and copies to the host run on a stream each. Nothing waits for the whole
device. A copy waits for what was computed before it was queued: attention over its buffer, or the
block that it writes back. The computation waits until a layer is `ready` in its buffer. All blocks
must be `stored` before a stream reads host memory, and before it writes what they were copied from.
The cache holds what `FullCache` holds, to the bit.

Legend: L layers, B batch, S slots, K KV heads, D head dim, T new tokens.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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


@dataclass
class Link:
    """Bytes that have travelled between host and device."""

    to_device: int = 0
    to_host: int = 0


class StagingBuffer:
    """A place on the device for K and V of one layer, (B, K, S, D) each."""

    def __init__(self, keys: Tensor, values: Tensor, streams: Streams) -> None:
        self.keys, self.values = keys, values
        self.layer = -1  # whose K and V it holds; at first none
        self.num_held = [0] * keys.shape[0]  # tokens of each row that are here
        self.ready = streams.event()
        for slots in (keys, values):
            streams.share(slots)


class Staging:
    """What the rows of a cache share: buffers, streams, the ring of latest tokens."""

    def __init__(self, shape: tuple[int, ...], num: int, streams: Streams, like: Tensor) -> None:
        """`shape` is (L, B, K, S, D) of the layers in host memory, which get `num` buffers; `like`
        has dtype and device."""
        L, B, K, S, D = shape
        self.streams, self.link = streams, Link()
        self.stored = streams.event()
        pairs = (like.new_empty(2, B, K, S, D) for _ in range(min(L, num)))
        self.buffers = [StagingBuffer(keys, values, streams) for keys, values in pairs]
        self.ring_keys, self.ring_values = (like.new_empty(L, B, K, RING, D) for _ in range(2))
        self.ring_starts = [0] * B  # first token of each row that is in the ring


class OffloadedFullCache(FullCache):
    """A `FullCache` of which all but the first layers are in host memory."""

    on_layer_staged: Callable[[int, Tensor, Tensor], None] | None = None
    """Called in a pass with every layer's number, keys and values (B, K, S, D), while these are on
    the device and before anything attends to them."""

    def __init__(
        self, config: ModelConfig, batch_size: int, capacity: int, *, on_chip: int,
        dtype: torch.dtype, device: torch.device, num_buffers: int = 2,
        host: HostMemory | None = None, streams: Streams | None = None,
    ) -> None:  # fmt: skip
        """An empty cache that keeps `on_chip` layers on the device, fewer than there are; `host`
        lends the memory of the others."""
        assert 0 <= on_chip < config.num_layers
        shape = (batch_size, config.num_kv_heads, round_up_to_stride(capacity), config.head_dim)
        keys, values = (torch.empty(on_chip, *shape, dtype=dtype, device=device) for _ in range(2))
        super().__init__(keys, values, [0] * batch_size)
        if streams is None:
            streams = CudaStreams(device) if device.type == "cuda" else Streams()
        hosted = (config.num_layers - on_chip, *shape)
        self._staging = Staging(hosted, num_buffers, streams, keys)
        self._rows = slice(0, batch_size)  # of the shared memory that are this cache's
        host = host or HostMemory(device)
        self.host_keys, self.host_values = (host.lend(self, hosted, dtype) for _ in range(2))

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
        return self.on_chip + self.host_keys.shape[0], B, K, S, D

    @property
    def link(self) -> Link:
        """What has travelled so far, for whichever row."""
        return self._staging.link

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values on the device and in host memory, less the staging buffers."""
        return super().num_bytes + 2 * self.host_keys.nbytes

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
        """Writes a block behind the prefixes in a buffer, and queues its way to host memory."""
        T, hosted = block.keys_BTKD.shape[1], buffer.layer - self.on_chip
        self._check_room(T)
        buffer.ready.wait()
        on_device = buffer.keys[self._rows], buffer.values[self._rows]
        write_block(*on_device, block, self._lengths)
        self._write_ring(hosted, block)
        self._write_back(hosted, buffer, T)
        return on_device

    def _write_back(self, hosted: int, buffer: StagingBuffer, T: int) -> None:
        """Queues the copies of the T tokens behind each row's prefix to host memory."""
        staging, both = self._staging, self._both(hosted, buffer)
        with staging.streams.copying("to host"):
            for b, start in self._row_lengths():
                new = slice(start, start + T)
                for host_BKSD, here_BKSD in both:
                    staging.link.to_host += copy_heads(host_BKSD[b, :, new], here_BKSD[b, :, new])
            staging.stored.record()

    def _both(self, hosted: int, buffer: StagingBuffer) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys, and values, of a layer in host memory, each with the place for it in a buffer."""
        keys, values = self.host_keys[hosted], self.host_values[hosted]
        return (keys, buffer.keys), (values, buffer.values)

    def _write_ring(self, hosted: int, block: BlockKV) -> None:
        """Writes the block into the ring, at its positions modulo RING."""
        staging, T = self._staging, block.keys_BTKD.shape[1]
        first = max(0, T - RING)
        k_BKTD, v_BKTD = (
            x[:, first:].transpose(1, 2) for x in (block.keys_BTKD, block.values_BTKD)
        )
        for row, (b, start) in enumerate(self._row_lengths()):
            places = torch.arange(start + first, start + T, device=self.device) % RING
            staging.ring_keys[hosted, b, :, places] = k_BKTD[row]
            staging.ring_values[hosted, b, :, places] = v_BKTD[row]
            if hosted == 0:
                staging.ring_starts[b] = max(min(staging.ring_starts[b], start), start + T - RING)

    def _prefetch(self, layer: int) -> StagingBuffer:
        """Queues the copies of a layer in host memory and of the next ones, as many as there are
        buffers; the first's buffer."""
        buffer = self._fetch(layer)
        for number in range(layer + 1, min(layer + len(self._staging.buffers), self.shape[0])):
            self._fetch(number)
        return buffer

    def _fetch(self, layer: int) -> StagingBuffer:
        """Queues the copy of those tokens of a layer that its staging buffer lacks, if any."""
        staging, hosted = self._staging, layer - self.on_chip
        buffer = staging.buffers[hosted % len(staging.buffers)]
        is_other = buffer.layer != layer
        if is_other:
            buffer.layer, buffer.num_held = layer, [0] * len(buffer.num_held)
        missing = [
            (b, slice(buffer.num_held[b], length))
            for b, length in self._row_lengths()
            if buffer.num_held[b] < length
        ]
        if not (missing or is_other):
            return buffer
        with staging.streams.copying("to device"):
            staging.stored.wait()
            for b, old in missing:
                for host_BKSD, here_BKSD in self._both(hosted, buffer):
                    staging.link.to_device += copy_heads(here_BKSD[b, :, old], host_BKSD[b, :, old])
                buffer.num_held[b] = old.stop
            buffer.ready.record()
        return buffer

    def layers(self, b: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.keys[:, b], self.values[:, b], strict=True)
        row = self.row(b)  # so that no other row's KV travels
        for layer in range(self.on_chip, self.shape[0]):
            buffer = row._prefetch(layer)
            buffer.ready.wait()
            yield buffer.keys[row._rows.start], buffer.values[row._rows.start]
        self._prefetch(self.on_chip)

    def tokens(self, b: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        on_device = super().tokens(b, start, end)
        staging, b = self._staging, b + self._rows.start
        if start >= staging.ring_starts[b]:
            places = torch.arange(start, end, device=self.device) % RING
            hosted = [ring[:, b, :, places] for ring in (staging.ring_keys, staging.ring_values)]
        else:
            staging.stored.wait()
            sources = (self.host_keys, self.host_values)
            hosted = [self._read(source[:, b, :, start:end]) for source in sources]
        keys, values = (torch.cat(pair) for pair in zip(on_device, hosted, strict=True))
        return keys, values

    def _read(self, host_LKTD: Tensor) -> Tensor:
        read_LKTD = torch.empty(host_LKTD.shape, dtype=self.dtype, device=self.device)
        for target_KTD, source_KTD in zip(read_LKTD, host_LKTD, strict=True):
            self.link.to_device += copy_heads(target_KTD, source_KTD)
        return read_LKTD

    def held_layers(self, b: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.keys[:, b], self.values[:, b], strict=True)
        synchronize(self.device)
        yield from zip(self.host_keys[:, b], self.host_values[:, b], strict=True)

    def write(self, layer: int, b: int, keys_KTD: Tensor, values_KTD: Tensor) -> None:
        if layer < self.on_chip:
            super().write(layer, b, keys_KTD, values_KTD)
            return
        synchronize(self.device)
        for host, new_KTD in ((self.host_keys, keys_KTD), (self.host_values, values_KTD)):
            host[layer - self.on_chip, b, :, : new_KTD.shape[1]] = new_KTD

    def restore(self, b: int, num_tokens: int) -> None:
        super().restore(b, num_tokens)
        self._staging.ring_starts[b] = num_tokens  # none of these tokens is in the ring

    def copy_from(self, other: FullCache) -> None:
        ours = (*self.keys, *self.host_keys, *self.values, *self.host_values)
        pairs = zip(ours, (*other.keys, *other.values), strict=True)
        for number, (ours_BKSD, theirs_BKSD) in enumerate(pairs):
            is_hosted = number % self.shape[0] >= self.on_chip
            for b, length in enumerate(other.lengths):
                num_bytes = copy_heads(ours_BKSD[b, :, :length], theirs_BKSD[b, :, :length])
                self.link.to_host += is_hosted * num_bytes
        self._staging.ring_starts = list(other.lengths)  # none of these tokens is in the ring
        self.advance(other.lengths)

    def row(self, b: int) -> "OffloadedFullCache":
        row = copy.copy(self)
        row.on_layer_staged = None
        row._rows = slice(self._rows.start + b, self._rows.start + b + 1)
        row.keys, row.values = self.keys[:, b : b + 1], self.values[:, b : b + 1]
        row._lengths = [self._lengths[b]]
        return row

    def advance(self, counts: list[int]) -> None:
        super().advance(counts)
        self._prefetch(self.on_chip)

    def keep_path(self, b: int, path: list[int]) -> None:
        super().keep_path(b, path)
        staging, start = self._staging, self._lengths[b]
        row, end = self._rows.start + b, start + 1 + len(path)
        old, new = (
            torch.tensor(places).to(self.device) % RING
            for places in ([start + place for place in path], range(start + 1, end))
        )
        for ring, host in (
            (staging.ring_keys, self.host_keys), (staging.ring_values, self.host_values)
        ):  # fmt: skip
            kept_LKTD = ring[:, row].index_select(2, old)
            ring[:, row, :, new] = kept_LKTD
            staging.streams.share(kept_LKTD)
            with staging.streams.copying("to host"):
                for host_KTD, kept_KTD in zip(
                    host[:, row, :, start + 1 : end], kept_LKTD, strict=True
                ):
                    staging.link.to_host += copy_heads(host_KTD, kept_KTD)
        with staging.streams.copying("to host"):
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


def copy_heads(target_KTD: Tensor, source_KTD: Tensor) -> int:
    """Copies without waiting, head by head: between host and device, what is not contiguous would
    go through a contiguous clone. Returns the bytes."""
    if target_KTD.shape[1]:
        for target_TD, source_TD in zip(target_KTD, source_KTD, strict=True):
            target_TD.copy_(source_TD, non_blocking=True)
    return target_KTD.nbytes
