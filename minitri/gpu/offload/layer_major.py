"""Reading a prompt layer by layer, into a full cache whose K and V are in host memory.

Chunk by chunk, every layer would fetch what earlier chunks have left there, for each chunk again:
3.8 TB for 122,880 tokens of a 7B model. Here a layer reads all chunks before the next one does. Its
K and V stay in a staging buffer meanwhile and travel once, to the host. What is kept are hidden
states of the whole prompt.

K and V are the same bits. Until the last layer is done the row counts as empty, and no other pass
may come between.

Legend: L layers, B batch (1), T tokens of a chunk, H query heads, D head dim, E hidden size.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from minitri.caches.full import FullCache
from minitri.gpu.offload.offloaded_cache import HostedRow, OffloadedFullCache
from minitri.model.block import make_block
from minitri.model.llama import Llama, Pass


def layer_by_layer(
    model: Llama, cache: HostedRow, tokens: list[int], queries_LBTHD: Tensor | None
) -> Iterator[None]:
    """Computes a chunk of a prompt, one layer whenever it is asked for the next."""
    block = make_block(model, [tokens], cache)
    x_BTE = model.embed(block.tokens_BT)
    for number, layer in enumerate(model.layers):
        rotary = model.rope.at(block.positions_BT)  # made afresh, as all chunks wait at once
        shared = Pass(block, rotary, cache, model.attend, None, queries_LBTHD)
        x_BTE = layer.forward(x_BTE, number, shared)
        yield


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
    the end, for the last chunks: those whose queries a ring of `max_queries` still holds.
    """
    config = model.config
    L = config.num_layers
    before = list(full.lengths)
    end = len(prompt) - 1
    starts = range(before[b], end, chunk)
    if not starts:
        return
    ends = [min(start + chunk, end) for start in starts]
    # Two chunks fill a ring of queries as all would, if a whole one fills it.
    first = max(0, len(ends) - 2) if chunk >= max_queries else 0
    queries, chunks = list[Tensor | None](), []
    for number, (start, stop) in enumerate(zip(starts, ends, strict=True)):
        size = (L, 1, min(max_queries, stop - start), config.num_heads, config.head_dim)
        queries.append(full.keys.new_empty(size) if watch and number >= first else None)
        row = HostedRow(full, b, start)
        chunks.append(layer_by_layer(model, row, prompt[start:stop], queries[-1]))
    for done in range(L * len(chunks)):
        next(chunks[done % len(chunks)])
        if done % L == L - 1 and done // L < len(chunks) - 1:
            yield ends[done // L]
    counts = [end - n if b == row else 0 for row, n in enumerate(before)]
    FullCache.advance(full, counts)  # fetches nothing: a pass or another prompt follows
    for queries_LBTHD in queries:
        if watch is not None and queries_LBTHD is not None:
            watch(queries_LBTHD[:, 0])
    yield end
