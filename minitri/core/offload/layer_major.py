"""Layer-major prefill, for a full cache in host memory: each layer reads all chunks of a prompt.

Chunk by chunk, every layer would fetch K and V of all earlier chunks, 3.8 TB for 122,880 tokens of
a 7B model. Layer by layer K and V are copied once, to the host, and hidden states of all chunks
stay on the device. Until the last layer is done the row counts as empty; no other pass may run.
Legend: L layers, B batch (1), T tokens of a chunk, H query heads, D head dim, E hidden size.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from minitri.core.model.block import empty_queries, make_block
from minitri.core.model.llama import Block, Llama, Pass
from minitri.core.offload.offloaded_cache import HostedRow, OffloadedFullCache


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
    blocks = list[Block]()
    queries = list[Tensor | None]()
    for start in starts:
        piece = prompt[start : min(start + chunk, end)]
        blocks.append(make_block(model, [piece], HostedRow(full, b, start)))
        is_watched = watch is not None and start + chunk > end - max_queries
        num_queries = min(max_queries, len(piece))
        queries.append(empty_queries(model, 1, num_queries) if is_watched else None)
    chunks_BTE = [model.embed(block.tokens_BT) for block in blocks]
    num_layers = 0  # of all chunks together
    for number, layer in enumerate(model.layers):
        for i, block in enumerate(blocks):
            rotary = model.rope.at(block.positions_BT)  # not kept, as all chunks exist at once
            cache = HostedRow(full, b, starts[i])
            shared = Pass(block, rotary, cache, model.attend, None, queries[i])
            chunks_BTE[i] = layer.forward(chunks_BTE[i], number, model.windowed(shared))
            num_layers += 1
            if num_layers % L == 0 and num_layers < L * len(blocks):
                yield starts[num_layers // L]
    full.hold(b, end, end)  # not `advance`, which fetches layers for a pass: a prompt may follow
    for queries_LBTHD in queries:
        if watch is not None and queries_LBTHD is not None:
            watch(queries_LBTHD[:, 0])
    yield end
