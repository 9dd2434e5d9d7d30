"""Layer-major prefill, for a full cache in host memory: each layer reads all chunks of a prompt.

Chunk by chunk, every layer would fetch K and V of all earlier chunks, 3.8 TB for 122,880 tokens of
a 7B model. Layer by layer K and V are copied once, to the host, and hidden states of all chunks
stay on the device. Until the last layer is done the row counts as empty; no other pass may run.
Legend: L layers, B batch (1), T tokens of a chunk, H query heads, D head dim, E hidden size.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from minitri.core.model.block import empty_queries, make_block
from minitri.core.model.llama import Llama, Pass
from minitri.core.offload.offloaded_cache import HostedRow, OffloadedFullCache


def layer_by_layer(
    model: Llama, cache: HostedRow, tokens: list[int], queries_LBTHD: Tensor | None
) -> Iterator[None]:
    """Generator that computes one chunk of a prompt, one layer whenever it is advanced."""
    block = make_block(model, [tokens], cache)
    x_BTE = model.embed(block.tokens_BT)
    for number, layer in enumerate(model.layers):
        rotary = model.rope.at(block.positions_BT)  # not kept, as all chunks exist at once
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
    """Layer-major `prefill` into a cache in host memory; yields how many tokens count as read."""
    L = model.config.num_layers
    end = len(prompt) - 1
    starts = range(full.lengths[b], end, chunk)
    if not starts:
        return
    queries = list[Tensor]()
    chunks = list[Iterator[None]]()
    for start in starts:
        piece = prompt[start : min(start + chunk, end)]
        queries_LBTHD = None
        if watch is not None and start + chunk > end - max_queries:
            queries_LBTHD = empty_queries(model, 1, min(max_queries, len(piece)))
            queries.append(queries_LBTHD)
        chunks.append(layer_by_layer(model, HostedRow(full, b, start), piece, queries_LBTHD))
    for done in range(L * len(chunks)):
        next(chunks[done % len(chunks)])
        if done % L == L - 1 and done // L < len(chunks) - 1:
            yield starts[done // L + 1]
    full.hold(b, end, end)  # not `advance`, which fetches layers for a pass: a prompt may follow
    if watch is not None:
        for queries_LBTHD in queries:
            watch(queries_LBTHD[:, 0])
    yield end
