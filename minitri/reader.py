"""A model with a cache, read block by block: from token lists to next-token laws.

`Reader.read` feeds whatever the cache has not seen of each row, in one forward pass for the whole batch. Rows may have
different amounts to read; shorter ones are padded behind, where nothing looks. This is the one place where logits
become laws, so every level applies the same filters.

`prefill` fills a row of a full cache beforehand, chunk by chunk.

Legend: B rows, T tokens read at once, N proposed tokens, E hidden size, V vocab, L layers, H query heads, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.attention_cuda import LONGEST_BLOCK
from minitri.caches.base import Cache
from minitri.caches.full import FullCache
from minitri.graphs import GraphedStep, GraphPool
from minitri.model import Llama
from minitri.sampling import probs_from_logits
from minitri.settings import SamplingParams


@dataclass(frozen=True)
class Block:
    """What a forward pass reads: one block of tokens per row, where they stand in the text, and in the cache."""

    tokens_BT: Tensor
    positions_BT: Tensor
    slots_BT: Tensor | None
    """None where the pass goes by the cache's lengths on the host."""


class Reader:
    """A model, its cache, and the filters that make its logits a law."""

    def __init__(
        self,
        model: Llama,
        cache: Cache,
        sampling: SamplingParams,
        *,
        vocab_size: int,
        queries_LBTHD: Tensor | None = None,
        graphs: GraphPool | None = None,
        block_sizes: Collection[int] = (),
    ) -> None:
        """`vocab_size` is that of the laws: the target's, whatever the model's. `queries_LBTHD` takes the rotated
        queries of every block. With `graphs`, a block is padded to the next of the `block_sizes`, for which the forward
        pass has been captured; a longer one runs as it is."""
        self.model = model
        self.cache = cache
        self.queries_LBTHD = queries_LBTHD
        self.sampling = sampling
        self.vocab_size = vocab_size
        self._steps: dict[int, GraphedStep[Block]] = {}
        if graphs is not None:
            self._capture(graphs, block_sizes)

    def read(self, sequences: list[list[int]], counts: list[int], active: list[bool]) -> Tensor:
        """Laws (B, max(counts) + 1, V) behind the last `counts[b] + 1` tokens of each row; see `cascade.Reader`."""
        fresh = [
            sequence[seen:] if on else sequence[-1:]
            for sequence, seen, on in zip(sequences, self.cache.num_tokens, active, strict=True)
        ]
        N, T = max(counts) + 1, max(map(len, fresh))
        first_B1 = torch.tensor([[len(row) - 1 - count] for row, count in zip(fresh, counts, strict=True)])
        index_BN = (first_B1 + torch.arange(N)).clamp_(0, T - 1).to(self.model.device, non_blocking=True)
        hidden_BTE = self._read_block(fresh)
        self.cache.advance([len(row) if on else 0 for row, on in zip(fresh, active, strict=True)])
        hidden_BNE = hidden_BTE.gather(1, index_BN.unsqueeze(2).expand(-1, -1, hidden_BTE.shape[2]))
        logits_BNV = self.model.logits(hidden_BNE)[..., : self.vocab_size]
        laws_BNV = probs_from_logits(logits_BNV.flatten(0, 1), self.sampling).unflatten(0, (-1, N))
        missing = self.vocab_size - laws_BNV.shape[-1]  # tokens that a drafter does not know: q = 0
        return F.pad(laws_BNV, (0, missing)) if missing else laws_BNV

    def _read_block(self, blocks: list[list[int]]) -> Tensor:
        T = max(map(len, blocks))
        size = min((size for size in self._steps if size >= T), default=None)
        if size is None:
            return read_block(self.model, blocks, self.cache, self.queries_LBTHD)
        return self._steps[size](make_block(self.model, blocks, self.cache, size))

    @torch.no_grad()
    def _capture(self, graphs: GraphPool, block_sizes: Collection[int]) -> None:
        """Captures the forward pass, now, so that it costs no decoding time. What it writes stands behind the prefixes.

        Blocks of more than `LONGEST_BLOCK` tokens go by lengths on the host, which a graph would keep as they are now.
        """
        step = functools.partial(forward, self.model, self.cache, self.queries_LBTHD)
        for size in sorted(size for size in block_sizes if size <= LONGEST_BLOCK):
            blocks = [[0] * size for _ in self.cache.lengths]
            self._steps[size] = graphs.capture(step, make_block(self.model, blocks, self.cache, size))

    def forget(self, lengths: list[int]) -> None:
        """Keeps at most the first `lengths[b]` tokens of row b."""
        self.cache.crop([min(seen, length) for seen, length in zip(self.cache.num_tokens, lengths, strict=True)])


def read_block(model: Llama, blocks: list[list[int]], cache: Cache, queries_LBTHD: Tensor | None = None) -> Tensor:
    """Final hidden states (B, T, E) of one block per row behind what the cache holds, T the length of the longest.

    The cache's lengths stay as they are.
    """
    return forward(model, cache, queries_LBTHD, make_block(model, blocks, cache, max(map(len, blocks))))


def forward(model: Llama, cache: Cache, queries_LBTHD: Tensor | None, block: Block) -> Tensor:
    """Final hidden states (B, T, E) of a block."""
    return model(
        block.tokens_BT, block.positions_BT, cache, slots_BT=block.slots_BT, queries_LBTHD=queries_LBTHD
    )  # fmt: skip


def make_block(model: Llama, blocks: list[list[int]], cache: Cache, size: int) -> Block:
    """The blocks, padded to `size` tokens, behind what the cache holds; sent to the device in one piece."""
    tokens_BT = torch.tensor([row + [0] * (size - len(row)) for row in blocks])
    tokens_BT.clamp_(max=model.config.vocab_size - 1)  # a drafter may lack the last tokens of the target's vocabulary
    ahead_T = torch.arange(size)
    positions_BT, slots_BT = (
        torch.tensor(starts).unsqueeze(1) + ahead_T for starts in (cache.next_positions, cache.lengths)
    )
    sent = torch.stack((tokens_BT, positions_BT, slots_BT)).to(model.device, non_blocking=True)
    return Block(sent[0], sent[1], sent[2] if by_lengths_on_device(model.device, size) else None)


def by_lengths_on_device(device: torch.device, size: int) -> bool:
    """Whether a pass over blocks of so many tokens reads the cache's lengths on the device."""
    return device.type == "cuda" and size <= LONGEST_BLOCK


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
    """Reads a prompt but for its last token into row b, `chunk` tokens at a time; yields how many have been read.

    After every chunk `watch` is given the rotated queries (L, T, H, D) of its last tokens, at most `max_queries`.
    """
    config = model.config
    while full.lengths[b] < len(prompt) - 1:
        start = full.lengths[b]
        piece = prompt[start : min(start + chunk, len(prompt) - 1)]
        queries_LBTHD = None
        if watch is not None:
            T = len(piece) if max_queries is None else min(max_queries, len(piece))
            shape = (config.num_layers, 1, T, config.num_heads, config.head_dim)
            queries_LBTHD = torch.empty(shape, dtype=model.dtype, device=model.device)
        read_block(model, [piece], full.row(b), queries_LBTHD)
        full.advance([len(piece) if b == other else 0 for other in range(len(full.lengths))])
        if watch is not None and queries_LBTHD is not None:
            watch(queries_LBTHD[:, 0])
        yield full.lengths[b]


def synchronize(device: torch.device) -> None:
    """Waits until the device has done everything it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
