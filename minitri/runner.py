"""Model runners: a model with a cache, from token lists to next-token distributions.

`ModelRunner.next_probs` feeds whatever the cache has not seen of each row in one forward pass for
the whole batch. Rows may have different amounts to read; shorter ones are padded at the end, where
nothing looks. Logits become distributions by the filters of `decoding/sampling.py`, at every level
the same. `DraftRunner` adds how a drafter gets to the end of a long text; `prefill` fills a row of
a full cache beforehand.

Legend: B rows, T tokens read at once, N proposed tokens, E hidden size, V vocab, L layers, H query
heads, D head dim.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.caches.streaming import StreamingCache
from minitri.decoding.level import Output
from minitri.decoding.sampling import pad_vocabulary, probs_of_rows
from minitri.decoding.verification import Proposal
from minitri.gpu.graphs import CapturedSteps, GraphPool
from minitri.gpu.offload.layer_major import read_by_layers
from minitri.gpu.offload.offloaded_cache import OffloadedFullCache
from minitri.model.block import make_block, read_block
from minitri.model.cache import Cache
from minitri.model.llama import Llama
from minitri.settings import SamplingParams


class ModelRunner:
    """A model, its cache, and the filters that make its logits a distribution."""

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
        """`vocab_size` is that of the distributions: the target's, whatever the model's.

        `queries_LBTHD` takes the rotated queries of every block. With `graphs` passes over blocks
        of the `block_sizes` are captured; others are padded to the next of these if there is one.
        """
        self.model = model
        self.cache = cache
        self.queries_LBTHD = queries_LBTHD
        self.sampling = [sampling] * len(cache.lengths)
        """The filters of each row."""
        self._vocab_size = vocab_size
        self.captured: CapturedSteps | None = None
        if graphs is not None:
            what: dict[str, Any] = {"vocab_size": vocab_size, "queries_LBTHD": queries_LBTHD}
            self.captured = CapturedSteps(model, cache, sampling, graphs, block_sizes, **what)

    def next_probs(
        self,
        sequences: list[list[int]],
        active: list[bool],
        guesses: Proposal | None = None,
        *,
        wants_logits: bool = False,
    ) -> Output:
        """Distributions (B, N + 1, V); see `decoding.level.Runner`."""
        counts = [0] * len(active) if guesses is None else guesses.counts
        certain = [  # of a row that is not active any token
            sequence[seen:] if on else sequence[-1:] or [0]
            for sequence, seen, on in zip(sequences, self.cache.num_tokens, active, strict=True)
        ]
        fresh = [row + [0] * count for row, count in zip(certain, counts, strict=True)]
        lasts_B1 = torch.tensor([[len(row) - 1] for row in certain])
        index_BN = lasts_B1 + torch.arange(max(counts) + 1)
        index_BN = index_BN.to(self.model.device, non_blocking=True)
        guessed = index_BN[:, 1:], None if guesses is None else guesses.tokens_BN
        return self._read(fresh, active, index_BN, *guessed, wants_logits=wants_logits)

    def next_probs_after(self, tokens_B: Tensor, active: list[bool]) -> Tensor:
        """Distributions (B, V); see `decoding.level.Runner`."""
        tokens_B1 = tokens_B.clamp(max=self.model.config.vocab_size - 1).unsqueeze(1)
        first_B1 = torch.zeros_like(tokens_B1)
        output = self._read([[0]] * len(active), active, first_B1, first_B1, tokens_B1)
        return output.probs_BNV.squeeze(1)

    def _read(
        self,
        fresh: list[list[int]],
        active: list[bool],
        index_BN: Tensor,
        places_BN: Tensor,
        guesses_BN: Tensor | None,
        *,
        wants_logits: bool = False,
    ) -> Output:
        """Reads a block of each row in one pass; what it gives after the tokens at `index_BN`. At
        `places_BN` stand guesses, which the host may not know."""
        T = max(map(len, fresh))
        size = self.captured.size_for(T) if self.captured is not None else None
        block = make_block(self.model, fresh, self.cache, size or T)
        if guesses_BN is not None and places_BN.shape[1] > 0:
            block = block.with_guesses(places_BN, guesses_BN)
        index_BN = index_BN.clamp(max=T - 1)
        if self.captured is not None and size is not None and not wants_logits:
            output = Output(take_rows(self.captured.by_size[size](block), index_BN))
        else:
            hidden_BTE = self.model.forward(block, self.cache, None, self.queries_LBTHD)
            output = self.output(take_rows(hidden_BTE, index_BN))
        self.cache.advance([len(row) if on else 0 for row, on in zip(fresh, active, strict=True)])
        return output

    def output(self, hidden_BNE: Tensor) -> Output:
        """Logits, and the distributions that the filters of each row make of them."""
        logits_BNV = self.model.logits(hidden_BNE)[..., : self._vocab_size]
        probs_BNV = probs_of_rows(logits_BNV, self.sampling)
        return Output(pad_vocabulary(probs_BNV, self._vocab_size), logits_BNV)

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """Nothing to do before a step."""

    def crop(self, lengths: list[int]) -> None:
        self.cache.crop(lengths)

    def reset(self, b: int) -> None:
        self.cache.reset(b)

    def sample_by(self, b: int, sampling: SamplingParams) -> None:
        """Row b has these filters from now on; captured steps apply them to all rows."""
        if self.captured is None:
            self.sampling[b] = sampling
        else:
            self.sampling = [sampling] * len(self.sampling)
            self.captured.sample_by(sampling)


class DraftRunner(ModelRunner):
    """A draft model over a streaming cache: a prompt of any length costs it one short pass."""

    cache: StreamingCache

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """A row that lacks more than a block, as after a prompt, reads its window by itself: with
        the batch it would pad the other rows beyond their room."""
        for b, sequence in enumerate(sequences):
            if active[b] and len(sequence) - self.cache.num_tokens[b] > self.cache.max_block:
                self._read_window(b, sequence[:-1])
        self.cache.slide()

    def _read_window(self, b: int, tokens: list[int]) -> None:
        """Fills row b with the sinks and the latest of these tokens, whatever was in it."""
        num_sinks = self.cache.num_sink_tokens
        window = tokens[:num_sinks] + tokens[num_sinks:][-self.cache.num_recent_tokens :]
        self.cache.reset(b)
        read_block(self.model, [window], self.cache.row(b))
        self.cache.hold(b, len(window), len(tokens))


def take_rows(rows_BTX: Tensor, index_BN: Tensor) -> Tensor:
    """Of each row of a batch the vectors (B, N, X) at these places, copied."""
    return rows_BTX.gather(1, index_BN.unsqueeze(2).expand(-1, -1, rows_BTX.shape[2]))


def empty_queries(model: Llama, batch_size: int, num_tokens: int) -> Tensor:
    """Room for rotated queries (L, B, T, H, D) of every layer, see `Llama.forward`."""
    config = model.config
    shape = (config.num_layers, batch_size, num_tokens, config.num_heads, config.head_dim)
    return torch.empty(shape, dtype=model.dtype, device=model.device)


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
    """Reads a prompt but for its last token into row b; yields after every `chunk` how many tokens
    have been read.

    `watch` is given the rotated queries (L, T, H, D) of a chunk's last tokens, at most
    `max_queries`. A cache in host memory is filled layer by layer, unless all queries are wanted.
    """
    if isinstance(full, OffloadedFullCache) and (watch is None or max_queries is not None):
        yield from read_by_layers(model, prompt, full, b, chunk, watch, max_queries or 0)
    end = len(prompt) - 1
    while (start := full.lengths[b]) < end:
        piece = prompt[start : min(start + chunk, end)]
        queries_LBTHD = None
        if watch is not None:
            queries_LBTHD = empty_queries(model, 1, min(max_queries or chunk, len(piece)))
        with model.execution.reading():
            read_block(model, [piece], full.row(b), queries_LBTHD, is_prompt=True)
        full.advance([len(piece) if b == other else 0 for other in range(len(full.lengths))])
        if watch is not None and queries_LBTHD is not None:
            watch(queries_LBTHD[:, 0])
        yield full.lengths[b]
