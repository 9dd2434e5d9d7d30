"""The full cache in host memory, for texts whose KV does not fit on the device (TriForce, section
5.2).

K and V of the first `on_chip` layers stay on the device. Those of the others live in page-locked
host memory, and are copied to one of two staging buffers before they are attended to: while layer l
computes, layer l + 1 is copied, and once a pass is over, the first two for the next one, while
others propose. Only valid tokens are copied, and what a pass adds is written back while the
computation goes on. A ring of the latest tokens stays on the device, from which the retrieval cache
takes them: they would wait for the copies of layers otherwise.

All copies run on one stream, in the order in which they are queued. A copy waits for what was
computed before it was queued: attention over its buffer, or the block that it writes back. The
computation waits until a buffer is `ready`: its layer is there, and what was written back before
has arrived, so that the block may take its place. The cache holds what `FullCache` holds, to the
bit.

Legend: P = 2 keys and values, L layers, B batch, S slots, K KV heads, D head dim, T new tokens.
Tokens come first in host memory and buffers, so that some of them are copied at once.
"""

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.caches.retrieval import RetrievalCache
from minitri.config import ModelConfig
from minitri.gpu.offload.host_memory import HostMemory
from minitri.gpu.streams import CopyStream
from minitri.model.cache import BlockKV, round_up_to_stride, write_block

RING = 128
"""Latest tokens of every row whose K and V stay on the device."""


class StagingBuffer:
    """A place on the device for K and V of one layer."""

    def __init__(self, kv_BSPKD: Tensor, stream: CopyStream) -> None:
        self.kv_BSPKD = kv_BSPKD
        self.layer = -1  # whose K and V it holds; at first none
        self.num_held = [0] * len(kv_BSPKD)  # tokens of each row that are here
        self.ready = stream.event()
        stream.share(kv_BSPKD)


class Staging:
    """What the rows of a cache share: host memory, buffers, the stream, the ring."""

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        stream: CopyStream,
        host: HostMemory,
        like: Tensor,
    ) -> None:
        """`shape` is (L, B, K, S, D) of the layers in host memory; `like` has dtype and device."""
        L, B, K, S, D = shape
        self.host_LBSPKD = host.lend(self, (L, B, S, 2, K, D), like.dtype)
        self.stream = stream
        tensors = (like.new_empty(B, S, 2, K, D) for _ in range(min(L, 2)))
        self.buffers = [StagingBuffer(kv_BSPKD, stream) for kv_BSPKD in tensors]
        self.ring_LBTPKD = like.new_empty(L, B, RING, 2, K, D)
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
        host: HostMemory | None = None,
        stream: CopyStream | None = None,
    ) -> "OffloadedFullCache":
        """An empty cache with `on_chip` layers on the device; `host` lends memory for others."""
        assert 0 <= on_chip < config.num_layers
        shape = (batch_size, config.num_kv_heads, round_up_to_stride(capacity), config.head_dim)
        keys, values = (torch.empty(on_chip, *shape, dtype=dtype, device=device) for _ in range(2))
        hosted = (config.num_layers - on_chip, *shape)
        staging = Staging(hosted, stream or CopyStream(device), host or HostMemory(device), keys)
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
        return self.on_chip + len(self._staging.host_LBSPKD), B, K, S, D

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values on the device and in host memory, less the staging buffers."""
        return super().num_bytes + self._staging.host_LBSPKD.nbytes

    def update(self, layer: int, block: BlockKV) -> tuple[Tensor, Tensor]:
        """See `model.cache.Cache`."""
        if layer < self.on_chip:
            on_device = super().update(layer, block)
        else:
            on_device = self._update_hosted(self._prefetch(layer), block)
        if self.on_layer_staged is not None:
            self.on_layer_staged(layer, *on_device)
        return on_device

    def _update_hosted(self, buffer: StagingBuffer, block: BlockKV) -> tuple[Tensor, Tensor]:
        """Writes a block after the prefixes in a buffer and into the ring, there at its positions
        modulo RING, and queues its way to host memory."""
        T = block.keys_BTKD.shape[1]
        self._check_room(T)
        buffer.ready.wait()
        keys_BKSD, values_BKSD = buffer.kv_BSPKD[self._rows].transpose(1, 3).unbind(2)
        write_block(keys_BKSD, values_BKSD, block, self._lengths)
        staging = self._staging
        hosted = buffer.layer - self.on_chip
        for b, start in self._row_lengths():
            end = start + T
            first = max(start, end - RING)
            places = torch.arange(first, end, device=self.device) % RING
            staging.ring_LBTPKD[hosted, b].index_copy_(0, places, buffer.kv_BSPKD[b, first:end])
            staging.ring_starts[b] = max(min(staging.ring_starts[b], start), end - RING)
            with staging.stream.copying():
                host_TPKD = staging.host_LBSPKD[hosted, b, start:end]
                host_TPKD.copy_(buffer.kv_BSPKD[b, start:end], non_blocking=True)
        return keys_BKSD, values_BKSD

    def _prefetch(self, layer: int) -> StagingBuffer:
        """Queues the copies of a hosted layer and of the next one; the first's buffer."""
        buffer = self._fetch(layer)
        if layer + 1 < self.shape[0]:
            self._fetch(layer + 1)
        return buffer

    def _fetch(self, layer: int) -> StagingBuffer:
        """Queues the copy of those tokens of a layer that its staging buffer lacks, if any."""
        staging = self._staging
        hosted = layer - self.on_chip
        buffer = staging.buffers[hosted % len(staging.buffers)]
        if buffer.layer != layer:
            buffer.layer = layer
            buffer.num_held = [0] * len(buffer.num_held)
        with staging.stream.copying():
            for b, end in self._row_lengths():
                missing = slice(buffer.num_held[b], end)
                host_SPKD = staging.host_LBSPKD[hosted, b, missing]
                buffer.kv_BSPKD[b, missing].copy_(host_SPKD, non_blocking=True)
                buffer.num_held[b] = max(buffer.num_held[b], end)
            buffer.ready.record()
        return buffer

    def layers(self, b: int) -> Iterator[tuple[Tensor, Tensor]]:
        end = self._lengths[b]
        for keys_KSD, values_KSD in self.held_layers(b):
            yield keys_KSD[:, :end].to(self.device), values_KSD[:, :end].to(self.device)

    def tokens(self, b: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        keys_LKTD, values_LKTD = super().tokens(b, start, end)
        staging = self._staging
        b = b + self._rows.start
        if start >= staging.ring_starts[b]:
            places = torch.arange(start, end, device=self.device) % RING
            hosted_LTPKD = staging.ring_LBTPKD[:, b].index_select(1, places)
        else:
            staging.stream.synchronize()
            layers = (
                host_TPKD.to(self.device) for host_TPKD in staging.host_LBSPKD[:, b, start:end]
            )
            hosted_LTPKD = torch.stack([*layers])
        keys, values = hosted_LTPKD.transpose(1, 3).unbind(2)
        return torch.cat((keys_LKTD, keys)), torch.cat((values_LKTD, values))

    def held_layers(self, b: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.keys[:, b], self.values[:, b], strict=True)
        self._staging.stream.synchronize()
        yield from zip(*self._staging.host_LBSPKD[:, b].transpose(1, 3).unbind(2), strict=True)

    def write(self, layer: int, b: int, keys_KTD: Tensor, values_KTD: Tensor) -> None:
        if layer < self.on_chip:
            super().write(layer, b, keys_KTD, values_KTD)
            return
        self._staging.stream.synchronize()
        new_TPKD = torch.stack((keys_KTD, values_KTD), 1).transpose(0, 2)
        self._staging.host_LBSPKD[layer - self.on_chip, b, : len(new_TPKD)] = new_TPKD
        self._staging.ring_starts[b] = len(new_TPKD)  # none of these tokens is in the ring

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
        kept_LTPKD = staging.ring_LBTPKD[:, row].index_select(1, old)
        staging.ring_LBTPKD[:, row].index_copy_(1, new, kept_LTPKD)
        staging.stream.share(kept_LTPKD)
        with staging.stream.copying():
            for host_BSPKD, kept_TPKD in zip(staging.host_LBSPKD, kept_LTPKD, strict=True):
                host_BSPKD[row, start + 1 : end].copy_(kept_TPKD, non_blocking=True)
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
