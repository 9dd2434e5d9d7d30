"""Prefill: reads a prompt into a row of a full cache, chunk by chunk, or layer by layer.

The last token of a prompt is not read here: `Stack.start` reads it, and samples the first output
token. With the cache in host memory each layer reads all chunks before the next layer starts: else
every chunk would fetch K and V of all earlier ones again, 3.8 TB for 122,880 tokens of a 7B model.
Legend: T tokens, N scored tokens, E hidden size, L layers, B rows, H query heads, D head dim.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from minitri.core.caches.full import FullCache
from minitri.core.decoding.sampling import log_probs
from minitri.core.model.block import empty_queries, make_block, read_block
from minitri.core.model.llama import Block, Llama, Pass
from minitri.core.offload.offloaded_cache import HostedRow, OffloadedFullCache
from minitri.core.settings import LONGEST_BLOCK
from minitri.core.stats import LogProbs


def prefill(
    model: Llama,
    prompt: list[int],
    full: FullCache,
    b: int,
    *,
    chunk: int,
    watch: Callable[[Tensor], None] | None = None,
    max_queries: int | None = None,
    scores: list[LogProbs] | None = None,
    num_top: int = 0,
    size: Callable[[], int] | None = None,
) -> Iterator[int]:
    """Reads a prompt but its last token into row b; after each chunk yields how many are read.
    `watch` gets rotated queries (L, T, H, D) of each chunk's last `max_queries` tokens (None: all).
    `scores` gets, for each token after one that is read, its log-probability and those of the
    `num_top` likeliest. `size` returns the length of the next chunk, else it is `chunk`. A cache
    in host memory is filled layer by layer, but not with `scores`, `size` or a `watch` of all."""
    is_plain = not size and scores is None
    if isinstance(full, OffloadedFullCache) and is_plain and (not watch or max_queries):
        yield from read_by_layers(model, prompt, full, b, chunk, watch, max_queries or 0)
    while (start := full.lengths[b]) < len(prompt) - 1:
        longest = size() if size else chunk
        piece = prompt[start : min(start + longest, len(prompt) - 1)]
        num_queries = min(max_queries or longest, len(piece))
        queries_LBTHD = empty_queries(model, 1, num_queries) if watch else None
        with model.execution.reading():
            hidden_1TE = read_block(model, [piece], full.row(b), queries_LBTHD, is_prompt=True)
        full.advance([len(piece) if b == other else 0 for other in range(len(full.lengths))])
        if scores is not None:
            for hidden_NE in hidden_1TE[0].split(LONGEST_BLOCK):  # more rows may round otherwise
                end = start + len(hidden_NE)
                scores += log_probs(model.logits(hidden_NE), prompt[start + 1 : end + 1], num_top)
                start = end
        if watch and queries_LBTHD is not None:
            watch(queries_LBTHD[:, 0])
        yield full.lengths[b]


def read_by_layers(
    model: Llama,
    prompt: list[int],
    full: OffloadedFullCache,
    b: int,
    chunk: int,
    watch: Callable[[Tensor], None] | None,
    max_queries: int,
) -> Iterator[int]:
    """Reads a prompt but its last token into row b of a cache in host memory, layer by layer.
    Yields its progress in tokens. `watch` gets rotated queries (L, T, H, D) of up to `max_queries`
    tokens of each of the last chunks. Hidden states of all chunks stay on the device, K and V are
    copied once. No other pass may run before the row's length grows, after the last layer."""
    L = model.config.num_layers
    end = len(prompt) - 1
    starts = range(full.lengths[b], end, chunk)
    if not starts:
        return
    blocks = list[Block]()
    queries = dict[int, Tensor]()  # by chunk, those that `watch` gets
    for start in starts:
        piece = prompt[start : min(start + chunk, end)]
        if watch and start + chunk > end - max_queries:
            queries[len(blocks)] = empty_queries(model, 1, min(max_queries, len(piece)))
        blocks.append(make_block(model, [piece], HostedRow(full, b, start)))
    chunks_BTE = [model.embed(block.tokens_BT) for block in blocks]
    num_layers = 0  # done, summed over chunks
    for layer in range(L):
        for i, block in enumerate(blocks):
            rotary = model.rope.at(block.positions_BT)  # not kept, as all chunks exist at once
            seen = (HostedRow(full, b, starts[i]), model.attend, None, queries.get(i))
            shared = Pass(block, rotary, *seen, layers=[layer])
            chunks_BTE[i] = model.layers.forward(chunks_BTE[i], model.windowed(shared))
            num_layers += 1
            if num_layers % L == 0 and num_layers < L * len(blocks):
                yield starts[num_layers // L]
    full.hold(b, end, end)  # not `advance`, which fetches layers for a pass: a prompt may follow
    if watch:
        for queries_LBTHD in queries.values():
            watch(queries_LBTHD[:, 0])
    yield end
