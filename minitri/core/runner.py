"""Model runners: a model with a cache, from token lists to next-token distributions.

`ModelRunner.next_probs` feeds whatever the cache has not seen of each row in one forward pass;
shorter rows are padded at the end, where nothing looks.

Legend: B rows, T tokens read at once, N proposed tokens, E hidden size, V vocab, L layers, H query
heads, D head dim.
"""

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.core.caches.streaming import StreamingCache
from minitri.core.decoding.level import Level, Output
from minitri.core.decoding.sampling import pad_vocabulary, probs_of_rows
from minitri.core.decoding.text_filters import TextFilters, filtered_logits, paths_of
from minitri.core.decoding.verification import Active, Proposal, Rows
from minitri.core.graphs import Function, GraphPool, Passes
from minitri.core.model.block import pack_block, read_block
from minitri.core.model.cache import Cache
from minitri.core.model.llama import Llama
from minitri.core.settings import LONGEST_BLOCK, SamplingParams


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
        """For `vocab_size` and `queries_LBTHD` see `Passes`. With `graphs` passes over blocks of
        `block_sizes` are captured, now, for filters of this form; others are padded to the next of
        these sizes, and trees to the last."""
        self.model = model
        self.cache = cache
        B = len(cache.lengths)
        self.sampling = [sampling] * B
        """The filters of each row."""
        self.text_filters: list[TextFilters | None] = [None] * B
        """Those that look at its text; passes of rows that have some are not captured."""
        self.passes = Passes(model, cache, sampling, vocab_size, queries_LBTHD)
        self.graphs = graphs
        self.block_sizes: list[int] = []
        if graphs is not None:
            # Longer blocks go by lengths on the host, which a graph would freeze.
            self.block_sizes = sorted(it for it in block_sizes if it <= LONGEST_BLOCK)
            for size in self.block_sizes:  # what this writes stands after the prefixes
                packed_4BT = pack_block(model, [[0]] * B, cache, size)
                guesses_BT = torch.zeros(B, size - 1, dtype=torch.int64)
                graphs.run(self.passes.probs, packed_4BT, guesses_BT)

    def next_probs(
        self, sequences: list[list[int]], active: list[bool], guesses: Proposal | None = None
    ) -> Output:
        """Distributions (B, N + 1, V); see `decoding.level.Runner`."""
        fresh = self.unread(sequences, active)
        guesses = guesses or Proposal.nothing(len(active))
        num_read = [len(row) + n for row, n in zip(fresh, guesses.counts, strict=True)]
        T = max(num_read)
        size = min((it for it in self.block_sizes if it >= T), default=T)
        tokens_BN = guesses.tokens_BN
        if self.graphs is not None:  # a graph has room for a guess at every place but the first
            tokens_BN = F.pad(tokens_BN, (0, size - 1 - tokens_BN.shape[1]))
        packed_4BT = pack_block(self.model, fresh, self.cache, size)
        paths = None
        if any(self.text_filters):
            paths = paths_of(self.text_filters, sequences, active, guesses.tokens)
        output = self._run(self.passes.read, self.passes.probs, paths, packed_4BT, tokens_BN)
        self.cache.advance([n if on else 0 for n, on in zip(num_read, active, strict=True)])
        return output

    def next_probs_after(self, sequences: Rows, drafted: list[Tensor], active: Active) -> Tensor:
        """Distributions (B, V); see `decoding.level.Runner`."""
        packed_4B1 = pack_block(self.model, [[0]] * len(active), self.cache, 1)
        paths = None
        if any(self.text_filters):
            tokens = torch.stack(drafted, 1).tolist()
            paths = [row[-1:] for row in paths_of(self.text_filters, sequences, active, tokens)]
        inputs = (packed_4B1, drafted[-1])
        output = self._run(self.passes.read_one, self.passes.probs_after, paths, *inputs)
        self.cache.advance([int(on) for on in active])
        return output.probs_BNV.squeeze(1)

    def read_tree(
        self,
        sequences: list[list[int]],
        active: list[bool],
        blocks: list[list[int]],
        depths_T: Tensor,
        rule_TT: Tensor,
        *,
        has_root: bool,
    ) -> Output:
        """Distributions (B, T, V), or more, after a tree's tokens, see `TreeLevel.read_tree`. The
        first of them is the last of the sequences if it `has_root`, else it follows."""
        paths = None
        if any(self.text_filters):
            above = [row_T.nonzero().flatten().tolist()[has_root:] for row_T in rule_TT]
            paths = paths_of(self.text_filters, sequences, active, blocks, above)
        size = max(self.block_sizes, default=len(rule_TT))
        pad = size - len(rule_TT)
        rule_TT = torch.block_diag(rule_TT, torch.eye(pad, dtype=torch.bool))
        depths_T = F.pad(depths_T, (0, pad))
        packed_4BT = pack_block(self.model, [row[:1] for row in blocks], self.cache, size, depths_T)
        guesses_BN = F.pad(torch.tensor(blocks)[:, 1:], (0, pad))
        inputs = (packed_4BT, guesses_BN, rule_TT)
        return self._run(self.passes.read, self.passes.probs, paths, *inputs)

    def unread(self, sequences: list[list[int]], active: list[bool]) -> list[list[int]]:
        """What the cache has not seen of each row; of a row that is not active any token."""
        return [
            sequence[seen:] if on else sequence[-1:] or [0]
            for sequence, seen, on in zip(sequences, self.cache.num_tokens, active, strict=True)
        ]

    def _run(
        self, read: Function, captured: Function, paths: list[Rows] | None, *inputs: Tensor
    ) -> Output:
        """What a pass gives: by its graph, or logits, and what the filters of each row make of
        them; `paths` for those that look at the text."""
        if self.graphs is not None and paths is None:
            probs_BNV, logits_BNV = self.graphs.run(captured, *inputs).clone()  # to be overwritten
            return Output(probs_BNV, logits_BNV[..., : self.model.config.vocab_size])
        device = self.model.device
        hidden_BNE = read(*(it.to(device, non_blocking=True) for it in inputs))
        logits_BNV = self.passes.logits(hidden_BNE)
        filtered_BNV = logits_BNV
        if paths is not None:
            filtered_BNV = filtered_logits(logits_BNV, self.text_filters, paths)
        probs_BNV = probs_of_rows(filtered_BNV, self.sampling, self.model.execution.probs)
        probs_BNV = pad_vocabulary(probs_BNV, self.passes.vocab_size)
        return Output(probs_BNV, logits_BNV, filtered_BNV)

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """Before a step filters take in what is certain now."""
        for own, sequence, on in zip(self.text_filters, sequences, active, strict=True):
            if own is not None and on:
                own.extend(sequence)

    def crop(self, lengths: list[int]) -> None:
        self.cache.crop(lengths)

    def reset(self, b: int) -> None:
        self.cache.reset(b)
        self.text_filters[b] = None

    def of_rows(self, rows: slice) -> Self:
        """A runner of these rows alone, which captures nothing."""
        part = copy.copy(self)
        part.cache = self.cache.of_rows(rows)
        part.sampling = self.sampling[rows]
        part.text_filters = self.text_filters[rows]
        queries_LBTHD = self.passes.queries_LBTHD
        if queries_LBTHD is not None:
            queries_LBTHD = queries_LBTHD[:, rows]
        part.passes = replace(self.passes, cache=part.cache, queries_LBTHD=queries_LBTHD)
        return part

    def sample_by(
        self, b: int, sampling: SamplingParams, text_filters: TextFilters | None = None
    ) -> None:
        """Row b has these filters from now on; captured passes apply them to all rows."""
        self.sampling[b] = sampling
        self.text_filters[b] = text_filters
        if self.graphs is not None:
            self.sampling = [sampling] * len(self.sampling)
            self.passes.numbers_3.copy_(torch.tensor(sampling.numbers, dtype=torch.float64))

    def can_sample_by(self, sampling: SamplingParams) -> bool:
        """Whether captured passes, if there are any, can apply these filters."""
        is_same_form = sampling.form == self.passes.filters.form
        return self.graphs is None or sampling.temperature == 0 or is_same_form


class DraftRunner(ModelRunner):
    """A draft model over a streaming cache: a prompt of any length costs it one short pass."""

    cache: StreamingCache

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """A row that lacks more than a block, as after a prompt, reads its window by itself."""
        super().prepare(sequences, active)
        for b, sequence in enumerate(sequences):
            if (
                active[b]
                and len(sequence) - self.cache.num_tokens[b] > self.cache.settings.max_block
            ):
                self._read_window(b, sequence[:-1])
        self.cache.slide()

    def guess(
        self, sequences: list[list[int]], active: list[bool], numbers_BN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """N tokens of each row, and the distributions (B, N, V) that they were sampled from."""
        fresh = self.unread(sequences, active)
        N = numbers_BN.shape[1]
        if self.graphs is not None:
            size = self.cache.settings.max_block  # always, so that graphs are few
            packed_4BT = pack_block(self.model, fresh, self.cache, size)
            guessed = self.graphs.run(self.passes.round, packed_4BT, numbers_BN)
            tokens_BN, probs_BNV = (it.clone() for it in guessed)  # the next replay overwrites them
        else:
            guess = self.model.execution.round
            assert guess is not None
            filters = (self.sampling, self.passes.vocab_size)
            tokens_BN, probs_BNV = guess(self.cache, fresh, numbers_BN, *filters)
        pairs = zip(fresh, active, strict=True)
        self.cache.advance([len(row) + N - 1 if on else 0 for row, on in pairs])
        return tokens_BN, probs_BNV

    def _read_window(self, b: int, tokens: list[int]) -> None:
        """Fills row b with the sinks and the latest of these tokens, whatever was in it."""
        settings = self.cache.settings
        sinks = settings.num_sink_tokens
        window = tokens[:sinks] + tokens[sinks:][-settings.num_recent_tokens :]
        self.cache.reset(b)
        read_block(self.model, [window], self.cache.row(b))
        self.cache.hold(b, len(window), len(tokens))


class CapturedDraft(Level):
    """A draft model, which has no stage below it, that guesses a round in one graph or call."""

    runner: DraftRunner

    def _draft(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        if any(self.runner.text_filters):
            return super()._draft(sequences, active)
        starts = [len(sequence) for sequence in sequences]
        numbers_BN = self.source.numbers([self.gamma - 1] * len(starts), starts, active)
        self.stats.num_rounds += self.gamma * sum(active)
        with self._meter.round(self.stats, num_tokens=self.gamma):
            guessed = self.runner.guess(sequences, active, numbers_BN)
        return self.drafted(*guessed, active)
