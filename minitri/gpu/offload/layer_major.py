"""Reading a prompt layer by layer, into a full cache whose K and V are in host memory.

Chunk by chunk, every layer would fetch what the chunks before have left there, for each chunk anew:
3.8 TB for 122,880 tokens of a 7B model. Here a layer reads all chunks before the next one does. Its
K and V stay in a staging buffer meanwhile and travel once, to the host. What is kept are hidden
states of the whole prompt.

Layers compute the same blocks after the same prefixes, so K and V are the same bits. Until the
last layer is done the row counts as empty, and no other pass may come between.

Legend: L layers, B batch (1), T tokens of a chunk, H query heads, D head dim, E hidden size.
"""

import math
from collections.abc import Callable, Iterator

from torch import Tensor

from minitri.caches.full import FullCache
from minitri.gpu.offload.offloaded_cache import OffloadedFullCache
from minitri.model.block import make_block
from minitri.model.cache import BlockKV
from minitri.model.llama import Llama, Pass


class RowInWork(OffloadedFullCache):
    """A row of an offloaded cache, as far as the chunks before one reach: a layer reads one chunk
    after another, before the next layer does, and nothing travels but what is new."""

    def __init__(self, full: OffloadedFullCache, b: int, start: int) -> None:
        """Shares the memory of row b."""
        super().__init__(*full.parts(b, start))

    def update(self, layer: int, block: BlockKV) -> tuple[Tensor, Tensor]:
        if layer < self.on_chip:
            return super().update(layer, block)
        buffer = self._fetch(layer)
        on_device = self._update_hosted(buffer, block)
        buffer.num_held[self._rows.start] = self._lengths[0] + block.keys_BTKD.shape[1]
        return on_device


class Chunk:
    """A chunk of a prompt on its way through the layers."""

    def __init__(
        self,
        model: Llama,
        cache: RowInWork,
        tokens: list[int],
        max_queries: int,
    ) -> None:
        """The queries of the last `max_queries` tokens are wanted."""
        self._cache = cache
        self.end = cache.lengths[0] + len(tokens)
        self._block = make_block(model, [tokens], cache, len(tokens))
        self._hidden_BTE = model.embed(self._block.tokens_BT)
        config = model.config
        T = min(max_queries, len(tokens))
        shape = (config.num_layers, 1, T, config.num_heads, config.head_dim)
        self.queries_LBTHD = self._hidden_BTE.new_empty(shape) if T else None

    def go_through(self, model: Llama, number: int) -> None:
        """Computes one layer."""
        slots_BT = self._block.slots_BT
        lengths_B = None if slots_BT is None else slots_BT[:, 0].contiguous()
        rotary = model.rope.at(self._block.positions_BT)
        queries_LBTHD = self.queries_LBTHD
        shared = Pass(rotary, self._cache, None, slots_BT, lengths_B, queries_LBTHD, model.attend)
        self._hidden_BTE = model.layers[number].forward(self._hidden_BTE, number, shared)


def read_by_layers(
    model: Llama,
    prompt: list[int],
    full: OffloadedFullCache,
    b: int,
    chunk: int,
    watch: Callable[[Tensor], None] | None,
    max_queries: int,
) -> Iterator[int]:
    """`runner.prefill` for a cache in host memory.

    Yields as often, whenever as much has been computed as for one more chunk. `watch` is called at
    the end, for the last chunks: those whose queries a ring of `max_queries` would still hold.
    """
    L = model.config.num_layers
    end = len(prompt) - 1
    before = list(full.lengths)
    starts = range(before[b], end, chunk)
    if not starts:
        return
    first = first_watched(len(starts), chunk, max_queries) if watch is not None else len(starts)
    chunks = [
        Chunk(model, RowInWork(full, b, start), prompt[start : min(start + chunk, end)], num)
        for start, num in zip(starts, [0] * first + [max_queries] * len(starts), strict=False)
    ]
    for done in range(L * len(chunks)):
        chunks[done % len(chunks)].go_through(model, done // len(chunks))
        if done % L == L - 1 and done // L < len(chunks) - 1:
            yield chunks[done // L].end
            assert full.lengths == before, "another pass came between two layers of a prompt"
    counts = [end - n if b == row else 0 for row, n in enumerate(before)]
    FullCache.advance(full, counts)  # fetches nothing: a pass or another prompt follows
    for read in chunks:
        if watch is not None and read.queries_LBTHD is not None:
            watch(read.queries_LBTHD[:, 0])
    yield end


def first_watched(num_chunks: int, chunk: int, window: int) -> int:
    """The first chunk whose queries must be observed, so that a ring of `window` ends up as if all
    had been: those that are left out fill it a whole number of times."""
    size = min(chunk, window)  # queries of a chunk
    num_last = 1 + -(-(window - 1) // size)  # enough to fill it, if the last chunk is one token
    period = window // math.gcd(window, size)
    return max(0, num_chunks - num_last) // period * period
