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

from minitri.gpu.attention import LONGEST_BLOCK
from minitri.model.cache import Cache
from minitri.caches.full import FullCache
from minitri.gpu.graphs import GraphedStep, GraphPool
from minitri.model.llama import Llama
from minitri.decoding.sampling import numbers_of, probs_from_logits
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
        queries of every block. With `graphs`, a block is padded to the next of the `block_sizes`, for which the way
        from tokens to laws has been captured; a longer one runs as it is."""
        self.model = model
        self.cache = cache
        self.queries_LBTHD = queries_LBTHD
        self.sampling = sampling
        self.vocab_size = vocab_size
        self._form = sampling.form
        self._numbers_3 = torch.tensor(
            numbers_of(sampling), dtype=torch.float64, device=model.device
        )
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
        first_B1 = torch.tensor(
            [[len(row) - 1 - count] for row, count in zip(fresh, counts, strict=True)]
        )
        index_BN = (
            (first_B1 + torch.arange(N)).clamp_(0, T - 1).to(self.model.device, non_blocking=True)
        )
        size = min((size for size in self._steps if size >= T), default=None)
        if size is not None:
            laws_BNV = pick(
                self._steps[size](make_block(self.model, fresh, self.cache, size)), index_BN
            )
        else:
            hidden_BNE = pick(
                read_block(self.model, fresh, self.cache, self.queries_LBTHD), index_BN
            )
            laws_BNV = laws_behind(self.model, hidden_BNE, self.sampling, self.vocab_size)
        self.cache.advance([len(row) if on else 0 for row, on in zip(fresh, active, strict=True)])
        return laws_BNV

    def can_sample_by(self, sampling: SamplingParams) -> bool:
        """Whether what has been captured leads to this law, too."""
        return sampling.temperature == 0 or sampling.form == self._form

    def sample_by(self, sampling: SamplingParams) -> None:
        """Goes over to another law."""
        assert self.can_sample_by(sampling)
        self.sampling = sampling
        self._numbers_3.copy_(torch.tensor(numbers_of(sampling), dtype=torch.float64))

    @torch.no_grad()
    def _capture(self, graphs: GraphPool, block_sizes: Collection[int]) -> None:
        """Captures the way from tokens to laws, now, so that it costs no decoding time. What it writes stands behind
        the prefixes.

        Blocks of more than `LONGEST_BLOCK` tokens go by lengths on the host, which a graph would keep as they are now.
        """
        step = functools.partial(
            laws_of_block,
            self.model,
            self.cache,
            self.queries_LBTHD,
            self.sampling,
            self.vocab_size,
            self._numbers_3,
        )
        for size in sorted(size for size in block_sizes if size <= LONGEST_BLOCK):
            blocks = [[0] * size for _ in self.cache.lengths]
            self._steps[size] = graphs.capture(
                step, make_block(self.model, blocks, self.cache, size)
            )

    def forget(self, lengths: list[int]) -> None:
        """Keeps at most the first `lengths[b]` tokens of row b."""
        self.cache.crop(
            [min(seen, length) for seen, length in zip(self.cache.num_tokens, lengths, strict=True)]
        )


def laws_of_block(
    model: Llama,
    cache: Cache,
    queries_LBTHD: Tensor | None,
    sampling: SamplingParams,
    vocab_size: int,
    numbers_3: Tensor,
    block: Block,
) -> Tensor:
    """Laws (B, T, V) behind every token of a block, by the sampling parameters in a tensor."""
    return laws_behind(
        model, forward(model, cache, queries_LBTHD, block), sampling, vocab_size, numbers_3
    )


def laws_behind(
    model: Llama,
    hidden_BNE: Tensor,
    sampling: SamplingParams,
    vocab_size: int,
    numbers_3: Tensor | None = None,
) -> Tensor:
    """Final hidden states to laws (B, N, V) over so many tokens; see `probs_from_logits`."""
    logits_BNV = model.logits(hidden_BNE)[..., :vocab_size]
    laws_BNV = probs_from_logits(logits_BNV.flatten(0, 1), sampling, numbers_3).unflatten(
        0, logits_BNV.shape[:2]
    )
    missing = vocab_size - laws_BNV.shape[-1]  # tokens that a drafter does not know: q = 0
    return F.pad(laws_BNV, (0, missing)) if missing else laws_BNV


def pick(rows_BTX: Tensor, index_BN: Tensor) -> Tensor:
    """Of each row of a batch the vectors (B, N, X) at these places, copied."""
    return rows_BTX.gather(1, index_BN.unsqueeze(2).expand(-1, -1, rows_BTX.shape[2]))


def read_block(
    model: Llama, blocks: list[list[int]], cache: Cache, queries_LBTHD: Tensor | None = None
) -> Tensor:
    """Final hidden states (B, T, E) of one block per row behind what the cache holds, T the length of the longest.

    The cache's lengths stay as they are.
    """
    return forward(
        model, cache, queries_LBTHD, make_block(model, blocks, cache, max(map(len, blocks)))
    )


def forward(model: Llama, cache: Cache, queries_LBTHD: Tensor | None, block: Block) -> Tensor:
    """Final hidden states (B, T, E) of a block."""
    return model(
        block.tokens_BT, block.positions_BT, cache, slots_BT=block.slots_BT, queries_LBTHD=queries_LBTHD
    )  # fmt: skip


def make_block(model: Llama, blocks: list[list[int]], cache: Cache, size: int) -> Block:
    """The blocks, padded to `size` tokens, behind what the cache holds; sent to the device in one piece."""
    tokens_BT = torch.tensor([row + [0] * (size - len(row)) for row in blocks])
    tokens_BT.clamp_(
        max=model.config.vocab_size - 1
    )  # a drafter may lack the last tokens of the target's vocabulary
    ahead_T = torch.arange(size)
    positions_BT, slots_BT = (
        torch.tensor(starts).unsqueeze(1) + ahead_T
        for starts in (cache.next_positions, cache.lengths)
    )
    sent = torch.stack((tokens_BT, positions_BT, slots_BT)).to(model.device, non_blocking=True)
    return Block(sent[0], sent[1], sent[2] if reads_slots(model.device, size) else None)


def reads_slots(device: torch.device, size: int) -> bool:
    """Whether a pass over blocks of so many tokens learns on the device where they belong in the cache."""
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
