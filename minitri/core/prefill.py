"""Prefill: reads a prompt into a row of a full cache, chunk by chunk.

The last token of a prompt is not read here: `Stack.start` reads it, and samples the first output
token. Legend: T tokens of a chunk, N scored tokens, E hidden size, V vocab, L layers, B rows,
H query heads, D head dim.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minitri.core.caches.full import FullCache
from minitri.core.decoding.sampling import log_probs
from minitri.core.model.block import empty_queries, read_block
from minitri.core.model.llama import Llama
from minitri.core.offload.layer_major import read_by_layers
from minitri.core.offload.offloaded_cache import OffloadedFullCache

SCORED_AT_ONCE = 256  # rows of logits in memory while a text is scored
Score = Callable[[Tensor, list[int]], None]  # of logits (N, V) and the N tokens that follow them


def score(model: Llama, ids: list[int], full: FullCache, *, chunk: int) -> Tensor:
    """Natural log-probabilities (N - 1,) of a text's tokens after the first, float32 on the CPU."""
    scores: list[float] = []

    def take(logits_NV: Tensor, tokens: list[int]) -> None:
        scores.extend(logprob for logprob, _ in log_probs(logits_NV, tokens, 0))

    while full.lengths[0] < len(ids) - 1:
        read_chunk(model, ids, full, 0, chunk, score=take)
    return torch.tensor(scores)


def prefill(
    model: Llama,
    prompt: list[int],
    full: FullCache,
    b: int,
    *,
    chunk: int,
    watch: Callable[[Tensor], None] | None = None,
    max_queries: int | None = None,
) -> Iterator[int]:
    """Reads a prompt without its last token into row b; yields after each chunk how many tokens the
    row holds. `watch` gets rotated queries (L, T, H, D) of each chunk's last `max_queries` tokens,
    None: of all. If `full` is in host memory, reads layer by layer, unless `watch` wants all."""
    if isinstance(full, OffloadedFullCache) and (watch is None or max_queries is not None):
        yield from read_by_layers(model, prompt, full, b, chunk, watch, max_queries or 0)
    while full.lengths[b] < len(prompt) - 1:
        yield read_chunk(model, prompt, full, b, chunk, watch, max_queries)


def read_chunk(
    model: Llama,
    prompt: list[int],
    full: FullCache,
    b: int,
    chunk: int,
    watch: Callable[[Tensor], None] | None = None,
    max_queries: int | None = None,
    score: Score | None = None,
) -> int:
    """Reads the next chunk of a prompt into row b; returns how many tokens the row holds. For
    `watch` see `prefill`. `score` gets logits (N, V) and the N tokens of the text that follow."""
    start = full.lengths[b]
    piece = prompt[start : min(start + chunk, len(prompt) - 1)]
    queries_LBTHD = None
    if watch is not None:
        queries_LBTHD = empty_queries(model, 1, min(max_queries or chunk, len(piece)))
    with model.execution.reading():
        hidden_1TE = read_block(model, [piece], full.row(b), queries_LBTHD, is_prompt=True)
    full.advance([len(piece) if b == other else 0 for other in range(len(full.lengths))])
    if score is not None:
        for hidden_NE in hidden_1TE[0].split(SCORED_AT_ONCE):
            start += len(hidden_NE)
            score(model.logits(hidden_NE), prompt[start - len(hidden_NE) + 1 : start + 1])
    if watch is not None and queries_LBTHD is not None:
        watch(queries_LBTHD[:, 0])
    return full.lengths[b]
