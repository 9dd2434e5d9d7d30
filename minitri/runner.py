"""Model runners: a model with a cache, from token lists to next-token distributions.

`ModelRunner.next_probs` feeds whatever the cache has not seen of each row in one forward pass for
the whole batch. Rows may have different amounts to read; shorter ones are padded at the end, where
nothing looks. This is the one place where logits become distributions, so every level applies the
same filters. `RetrievalRunner` adds how the retrieval cache follows the full one, `DraftRunner` how
a drafter gets to the end of a long text. `prefill` fills a row of a full cache beforehand.

Legend: B rows, T tokens read at once, N proposed tokens, E hidden size, V vocab, L layers, H query
heads, D head dim.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.caches.retrieval import RetrievalCache
from minitri.caches.streaming import StreamingCache
from minitri.decoding.level import Emitted, Output
from minitri.decoding.sampling import pad_vocabulary, probs_of_rows
from minitri.decoding.verification import Proposal
from minitri.gpu.graphs import CapturedSteps, GraphPool
from minitri.gpu.offload.layer_major import read_by_layers
from minitri.gpu.offload.offloaded_cache import OffloadedFullCache
from minitri.model.block import Block, forward_block, make_block, read_block
from minitri.model.cache import Cache
from minitri.model.llama import Llama
from minitri.settings import SamplingParams, SpeculationConfig


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

        `queries_LBTHD` takes the rotated queries of every block. With `graphs` the way from tokens
        to distributions is captured for each of the `block_sizes`, and a block is padded to the
        next of them; a longer one runs as it is.
        """
        self.model = model
        self.cache = cache
        self._sampling = [sampling] * len(cache.lengths)
        self.queries_LBTHD = queries_LBTHD
        self._vocab_size = vocab_size
        self.captured: CapturedSteps | None = None
        if graphs is not None:
            self.captured = CapturedSteps(
                model,
                cache,
                sampling,
                graphs,
                block_sizes,
                vocab_size=vocab_size,
                queries_LBTHD=queries_LBTHD,
            )

    def next_probs(
        self,
        sequences: list[list[int]],
        active: list[bool],
        guesses: Proposal | None = None,
        *,
        wants_logits: bool = False,
    ) -> Output:
        """Distributions (B, N + 1, V); see `decoding.level.Runner`."""
        certain = [
            sequence[seen:] if on else sequence[-1:] or [0]
            for sequence, seen, on in zip(sequences, self.cache.num_tokens, active, strict=True)
        ]
        counts = [0] * len(active) if guesses is None else guesses.counts
        fresh = [row + [0] * count for row, count in zip(certain, counts, strict=True)]
        N, T = max(counts) + 1, max(map(len, fresh))
        lasts = torch.tensor([len(row) - 1 for row in certain])
        index_BN = (lasts.unsqueeze(1) + torch.arange(N)).to(self.model.device, non_blocking=True)
        block = make_block(self.model, fresh, self.cache, self._padded_size(T))
        if guesses is not None and N > 1:
            block = block.with_guesses(index_BN[:, 1:], guesses.tokens_BN)
        output = self._run(block, index_BN.clamp(max=T - 1), wants_logits=wants_logits)
        self.cache.advance([len(row) if on else 0 for row, on in zip(fresh, active, strict=True)])
        return output

    def next_probs_after(self, tokens_B: Tensor, active: list[bool]) -> Tensor:
        """Distributions (B, V); see `decoding.level.Runner`."""
        tokens_B1 = tokens_B.clamp(max=self.model.config.vocab_size - 1).unsqueeze(1)
        first_B1 = torch.zeros_like(tokens_B1)
        block = make_block(self.model, [[0]] * len(active), self.cache, self._padded_size(1))
        block = block.with_guesses(first_B1, tokens_B1)
        output = self._run(block, first_B1)
        self.cache.advance([int(on) for on in active])
        return output.probs_BNV.squeeze(1)

    def _padded_size(self, T: int) -> int:
        """Tokens of the captured block that holds T; T itself if there is none."""
        return (self.captured.size_for(T) if self.captured is not None else None) or T

    def _run(self, block: Block, index_BN: Tensor, *, wants_logits: bool = False) -> Output:
        """What a pass over a block gives after the tokens at these places."""
        size = block.tokens_BT.shape[1]
        if self.captured is not None and size in self.captured.by_size and not wants_logits:
            return Output(take_rows(self.captured.by_size[size](block), index_BN))
        hidden_BTE = forward_block(self.model, block, self.cache, self.queries_LBTHD)
        return self.output(take_rows(hidden_BTE, index_BN))

    def output(self, hidden_BNE: Tensor) -> Output:
        """Logits, and the distributions that the filters of each row make of them."""
        logits_BNV = self.model.logits(hidden_BNE)[..., : self._vocab_size]
        probs_BNV = probs_of_rows(logits_BNV, self._sampling)
        return Output(pad_vocabulary(probs_BNV, self._vocab_size), logits_BNV)

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """Nothing to do before a step."""

    def commit(self, emitted: list[Emitted], active: list[bool], *, has_guessed: bool) -> None:
        """Nothing to do after a step: the cache was cropped to what was accepted."""

    def crop(self, lengths: list[int]) -> None:
        """Keeps at most the first `lengths[b]` tokens of row b."""
        seen = self.cache.num_tokens
        self.cache.crop([min(pair) for pair in zip(seen, lengths, strict=True)])

    def reset(self, b: int) -> None:
        """Empties row b."""
        self.cache.reset(b)

    def can_sample_by(self, sampling: SamplingParams) -> bool:
        """Whether what was captured, if anything, can apply these filters, too."""
        return self.captured is None or self.captured.can_sample_by(sampling)

    def sample_by(self, sampling: SamplingParams, b: int) -> None:
        """Changes the filters of row b; captured steps have one kind for all rows."""
        rows = enumerate(self._sampling)
        is_shared = self.captured is not None
        self.sampling = [sampling if is_shared or row == b else own for row, own in rows]

    @property
    def sampling(self) -> list[SamplingParams]:
        """The filters of each row."""
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: list[SamplingParams]) -> None:
        if self.captured is not None and sampling[0] != self._sampling[0]:
            self.captured.sample_by(sampling[0])
        self._sampling = sampling


class RetrievalRunner(ModelRunner):
    """The target over its retrieval cache."""

    cache: RetrievalCache

    def __init__(
        self,
        model: Llama,
        cache: RetrievalCache,
        sampling: SamplingParams,
        full_queries_LBTHD: Tensor,
        **settings: Any,
    ) -> None:
        """`full_queries_LBTHD` holds the queries of the latest pass over the full cache."""
        super().__init__(model, cache, sampling, **settings)
        self._full_queries_LBTHD = full_queries_LBTHD

    def commit(self, emitted: list[Emitted], active: list[bool], *, has_guessed: bool) -> None:
        """Copies exact K and V of the accepted tokens into the cache; may rebuild it."""
        for b, row in enumerate(emitted):
            if active[b]:
                # The pass read the token before and the guesses; len(row.tokens) of them stay.
                queries_LTHD = self._full_queries_LBTHD[:, b, : len(row.tokens)]
                was_rejected = row.origins[-1] == "recovered"
                self.cache.commit(
                    b, queries_LTHD, was_rejected=was_rejected, has_guessed=has_guessed
                )


class DraftRunner(ModelRunner):
    """A draft model over a streaming cache: a prompt of any length costs it one short pass."""

    cache: StreamingCache

    def __init__(
        self,
        model: Llama,
        batch_size: int,
        sampling: SamplingParams,
        speculation: SpeculationConfig,
        **settings: Any,
    ) -> None:
        self._max_block = speculation.max_block
        cache = StreamingCache(
            model.config,
            model.rope,
            batch_size,
            speculation,
            dtype=model.dtype,
            device=model.device,
        )
        super().__init__(model, cache, sampling, block_sizes={1, 2, self._max_block}, **settings)

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """Gets ready to guess after sequences that are certain: all but their last tokens.

        A row that lacks more than a block, as after a prompt, reads its window by itself: with
        the batch it would pad the other rows beyond their room.
        """
        for b, sequence in enumerate(sequences):
            if active[b] and len(sequence) - self.cache.num_tokens[b] > self._max_block:
                self._read_window(b, sequence[:-1])
        self.cache.slide()

    def _read_window(self, b: int, tokens: list[int]) -> None:
        """Fills row b with the sinks and the latest of these tokens, whatever was in it."""
        num_sinks = self.cache.num_sink_tokens
        window = tokens[:num_sinks] + tokens[num_sinks:][-self.cache.num_recent_tokens :]
        read_block(self.model, [window], self.cache.empty_row(b))
        self.cache.set_window(b, num_slots=len(window), num_tokens=len(tokens))


def take_rows(rows_BTX: Tensor, index_BN: Tensor) -> Tensor:
    """Of each row of a batch the vectors (B, N, X) at these places, copied."""
    return rows_BTX.gather(1, index_BN.unsqueeze(2).expand(-1, -1, rows_BTX.shape[2]))


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
    """Reads a prompt but for its last token into row b, `chunk` tokens at a time.

    Yields how many tokens have been read. Where the model is row-invariant, K and V do not depend,
    to the bit, on where chunks begin. After every chunk `watch` is given the rotated queries
    (L, T, H, D) of its last tokens, at most `max_queries`. A cache in host memory is filled layer
    by layer, unless all queries are wanted: see `gpu/offload/layer_major.py`.
    """
    if isinstance(full, OffloadedFullCache) and (watch is None or max_queries is not None):
        yield from read_by_layers(model, prompt, full, b, chunk, watch, max_queries or 0)
    config = model.config
    while full.lengths[b] < len(prompt) - 1:
        start = full.lengths[b]
        piece = prompt[start : min(start + chunk, len(prompt) - 1)]
        queries_LBTHD = None
        if watch is not None:
            T = len(piece) if max_queries is None else min(max_queries, len(piece))
            shape = (config.num_layers, 1, T, config.num_heads, config.head_dim)
            queries_LBTHD = torch.empty(shape, dtype=model.dtype, device=model.device)
        with model.execution.reading():
            read_block(model, [piece], full.row(b), queries_LBTHD, is_prompt=True)
        full.advance([len(piece) if b == other else 0 for other in range(len(full.lengths))])
        if watch is not None and queries_LBTHD is not None:
            watch(queries_LBTHD[:, 0])
        yield full.lengths[b]
