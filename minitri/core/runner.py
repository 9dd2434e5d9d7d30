"""Model runners: a model with a cache, from token lists to next-token distributions.

`ModelRunner.next_probs` reads what the cache lacks of each row in one forward pass, in blocks that
are padded at the end. `Passes` are the computations on the device, which CUDA graphs replay. A
`DraftRunner` has a streaming cache, and guesses a whole round in one call if possible.
Legend: B rows, T tokens, N guesses, E hidden size, V vocab, L layers, H heads, D dim;
packed_4BT: a block and the places of its outputs, see `pack_block`.
"""

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.core.caches.streaming import StreamingCache
from minitri.core.decoding.random_source import RandomSource, sample_by_number
from minitri.core.decoding.sampling import pad_vocabulary, probs_by_tensor, probs_of_rows
from minitri.core.decoding.text_filters import TextFilters, filtered_logits, paths_of
from minitri.core.decoding.verification import Active, Guesses, Output, Proposal, Rows, Rule
from minitri.core.graphs import Function, GraphPool
from minitri.core.model.block import pack_block, read_block, unpack_block
from minitri.core.model.cache import Cache
from minitri.core.model.llama import Llama
from minitri.core.settings import SamplingParams

MOST_RECENT = 60  # latest tokens reread to catch up; twice as many gain < 0.03 of acceptance


@dataclass(eq=False)
class Passes:
    """Computations of a model over a cache, as functions of tensors that a CUDA graph can hold.
    They refer to no graph: a cycle would keep the cache after its run."""

    model: Llama
    cache: Cache
    sampling: SamplingParams
    """Graphs freeze top-k and which filters are on, and read other values from `numbers_B3`."""
    vocab_size: int  # of the target, and so of every distribution
    queries_LBTHD: Tensor | None = None  # filled with rotated queries of the latest block
    rounds: Any = None  # `KernelRounds`, which computes the same in one call each, on a CPU

    def __post_init__(self) -> None:
        if not self.cache.is_hosted:
            self.rounds = self.rounds or self.model.execution.rounds(self.model)
        rows = [self.sampling.numbers] * len(self.cache.lengths)
        self.numbers_B3 = torch.tensor(rows, dtype=torch.float64, device=self.model.device)

    def forward(
        self, packed_4BT: Tensor, guesses_BN: Tensor, mask_TT: Tensor | None = None
    ) -> Tensor:
        """Final hidden states (B, N + 1, E) after each row's last token and each of its N guesses.
        The block is packed by `pack_block`; `mask_TT`: which token of a tree sees which."""
        places_BN = packed_4BT[3, :, : guesses_BN.shape[1] + 1]  # of the N + 1 outputs
        block = unpack_block(packed_4BT)
        T = packed_4BT.shape[2]
        if guesses_BN.numel():  # guesses past the block's end are ignored
            padded_BT = F.pad(block.tokens_BT, (0, 1))
            tokens_BT = padded_BT.scatter(1, places_BN[:, 1:].clamp(max=T), guesses_BN)[:, :-1]
            block = replace(block, tokens_BT=tokens_BT.contiguous())
        hidden_BTE = self.model.forward(block, self.cache, mask_TT, self.queries_LBTHD)
        if T == 1:
            return hidden_BTE
        return hidden_BTE.take_along_dim(places_BN.clamp(max=T - 1).unsqueeze(2), 1)

    def forward_one(self, packed_4B1: Tensor, tokens_B: Tensor) -> Tensor:
        """Final hidden states (B, 1, E) after `tokens_B`; `packed_4B1` has positions and slots."""
        # A drafter may lack the last tokens of the target's vocabulary.
        tokens_B1 = tokens_B.clamp(max=self.model.config.vocab_size - 1).unsqueeze(1)
        block = replace(unpack_block(packed_4B1), tokens_BT=tokens_B1)
        return self.model.forward(block, self.cache, None, self.queries_LBTHD)

    def head(self, hidden_BNE: Tensor) -> Tensor:
        """Logits (B, N, V) of hidden states, for tokens that both the model and the target have."""
        return self.model.logits(hidden_BNE)[..., : self.vocab_size]

    def probs(self, logits_BNV: Tensor) -> Tensor:
        """Distributions (B, N, V) of logits, by temperature, top-p, min-p in `self.numbers_B3`."""
        probs_BNV = probs_by_tensor(logits_BNV, self.sampling, self.numbers_B3)
        return pad_vocabulary(probs_BNV, self.vocab_size)

    def verify(
        self, packed_4BT: Tensor, numbers_BN: Tensor, guesses: Guesses, *, rule: Rule
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Reads a block packed by `pack_block`; `rule` verifies N guesses in it by random numbers.
        Returns logits, distributions (B, N + 1, V), and the packed `Verdict` (B, 3 + N)."""
        logits_BNV = self.head(self.forward(packed_4BT, guesses.tokens_BN))
        probs_BNV = self.probs(logits_BNV)
        return logits_BNV, probs_BNV, rule(probs_BNV, numbers_BN, guesses).packed(guesses)

    def draft(self, packed_4BT: Tensor, numbers_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Reads a block packed by `pack_block`; then samples N tokens per row by random numbers.
        Returns the tokens (B, N) and the distributions (B, N, V) that they were sampled from."""
        last_4B1 = packed_4BT.take_along_dim(packed_4BT[3:, :, :1], 2)
        hidden_B1E = self.forward(packed_4BT, packed_4BT[0, :, :0])
        tokens, probs = list[Tensor](), list[Tensor]()
        for i, numbers_B in enumerate(numbers_BN.unbind(1)):
            if i > 0:
                # Position and slot are i later; `forward_one` replaces the id.
                hidden_B1E = self.forward_one(last_4B1 + i, tokens[-1])
            probs.append(self.probs(self.head(hidden_B1E))[:, 0])
            tokens.append(sample_by_number(probs[-1], numbers_B))
        return torch.stack(tokens, 1), torch.stack(probs, 1)


class ModelRunner:
    """A model, its cache, and the filters that turn its logits into distributions."""

    def __init__(
        self, passes: Passes, *, graphs: GraphPool | None = None, block_sizes: Collection[int] = ()
    ) -> None:
        """With `graphs`, `passes` are replayed over blocks of `block_sizes` tokens per row.
        Other blocks are padded to the next size, trees to the largest."""
        B = len(passes.cache.lengths)
        self.passes = passes
        self.model = passes.model
        self.cache = passes.cache
        self.sampling = [passes.sampling] * B
        self.text_filters: list[TextFilters | None] = [None] * B
        self.graphs = graphs
        self.block_sizes = sorted(block_sizes) if graphs else []

    def next_probs(
        self,
        sequences: Rows,
        active: Active,
        guesses: Proposal | None = None,
        source: RandomSource | None = None,
    ) -> Output:
        """Reads what the cache lacks of active rows, and up to N guesses. Returns distributions
        (B, N + 1, V); with `source` perhaps `emitted_rows`, if a call or graph verifies, too."""
        fresh = self.unread(sequences, active)
        guesses = guesses or Proposal.nothing(len(active))
        num_read = [len(row) + n for row, n in zip(fresh, guesses.counts, strict=True)]
        T = max(num_read)
        size = min((size for size in self.block_sizes if size >= T), default=T)
        packed_4BT = pack_block(self.model, fresh, self.cache, size)
        # A graph has room for a guess at every place but the first.
        N = size - 1 if self.graphs else guesses.tokens_BN.shape[1]
        rounds = self.passes.rounds
        graphs = self.captured
        if source and (graphs or rounds) and not any(self.text_filters):
            numbers_BN = source.numbers(guesses.counts, [*map(len, sequences)], active)
            inputs = (packed_4BT, *guesses.padded(numbers_BN, N, self.passes.vocab_size))
            if graphs:  # probabilities are read after the next run of a graph, logits are not
                verified = graphs.run(self.passes.verify, *inputs, rule=source.rule)
                logits_BNV, probs_BNV, verdict_BX = verified[0], verified[1].clone(), verified[2]
            else:
                logits_BNV, probs_BNV, verdict_BX = rounds.verify(self, *inputs, source.rule)
            output = Output(probs_BNV, logits_BNV, logits_BNV, guesses.emitted(verdict_BX))
        else:
            tokens_BN = F.pad(guesses.tokens_BN, (0, N - guesses.tokens_BN.shape[1]))
            paths = None
            if any(self.text_filters):  # else the host need not wait for the guesses
                paths = paths_of(self.text_filters, sequences, active, guesses.tokens)
            output = self._output(self.passes.forward, paths, packed_4BT, tokens_BN)
        self.cache.advance([n if on else 0 for n, on in zip(num_read, active, strict=True)])
        return output

    def next_probs_after(self, sequences: Rows, drafted: list[Tensor], active: Active) -> Tensor:
        """Reads `drafted[-1]`, (B,), the latest of the tokens drafted after active rows' sequences.
        Returns the distributions (B, V) after it."""
        packed_4B1 = pack_block(self.model, [[0]] * len(active), self.cache, 1)
        paths = None
        if any(self.text_filters):
            tokens = torch.stack(drafted, 1).tolist()
            paths = [row[-1:] for row in paths_of(self.text_filters, sequences, active, tokens)]
        output = self._output(self.passes.forward_one, paths, packed_4B1, drafted[-1])
        self.cache.advance([int(on) for on in active])
        return output.probs_BNV.squeeze(1)

    def draft(
        self, sequences: Rows, active: Active, N: int, source: RandomSource
    ) -> tuple[Tensor, Tensor]:
        """Samples N tokens after each active row's sequence, one by one, by numbers of `source`.
        Returns them (B, N), and the distributions (B, N, V) that they were sampled from."""
        starts = [len(sequence) for sequence in sequences]
        probs = [self.next_probs(sequences, active).probs_BNV[:, 0]]
        tokens = [source.sample(probs[0], starts, active)]
        for i in range(1, N):
            probs.append(self.next_probs_after(sequences, tokens, active))
            tokens.append(source.sample(probs[i], [start + i for start in starts], active))
        return torch.stack(tokens, 1), torch.stack(probs, 1)

    def read_tree(
        self,
        sequences: Rows,
        active: Active,
        blocks: Rows,
        depths: list[int],
        mask_TT: Tensor,
        *,
        has_root: bool,
    ) -> Output:
        """Reads a tree of T tokens after each active row's sequence, for distributions after each.
        Token i of `blocks[b]` has depth `depths[i]`, and sees token j if `mask_TT[i, j]`. With
        `has_root` token 0 is the last of the sequence. Lengths of the cache do not change."""
        paths = None
        if any(self.text_filters):
            above = [row_T.nonzero().flatten().tolist()[has_root:] for row_T in mask_TT]
            paths = paths_of(self.text_filters, sequences, active, blocks, above)
        size = max(self.block_sizes, default=len(mask_TT))
        pad = size - len(mask_TT)
        mask_TT = torch.block_diag(mask_TT, torch.eye(pad, dtype=torch.bool))
        roots = [row[:1] for row in blocks]
        packed_4BT = pack_block(self.model, roots, self.cache, size, depths + [0] * pad)
        guesses_BN = F.pad(torch.tensor(blocks)[:, 1:], (0, pad))
        return self._output(self.passes.forward, paths, packed_4BT, guesses_BN, mask_TT)

    def unread(self, sequences: Rows, active: Active) -> Rows:
        """Tokens of active rows that the cache has not read; any one token of inactive rows."""
        return [
            sequence[num_read:] if on else sequence[-1:] or [0]
            for sequence, num_read, on in zip(sequences, self.cache.num_tokens, active, strict=True)
        ]

    def _output(self, forward: Function, paths: list[Rows] | None, *inputs: Tensor) -> Output:
        """Runs the pass `forward(*inputs)`, LM head and filters; `paths[b][n]` are the tokens
        before output n that row b's text filters have not counted, None without such filters."""
        if rounds := self.passes.rounds:
            logits_BNV = rounds.read(self, *inputs)
        elif self.graphs:
            logits_BNV = self.passes.head(self.graphs.run(forward, *inputs))
        else:
            inputs = tuple(it.to(self.model.device, non_blocking=True) for it in inputs)
            logits_BNV = self.passes.head(forward(*inputs))
        filtered_BNV = logits_BNV
        if paths is not None:
            filtered_BNV = filtered_logits(logits_BNV, self.text_filters, paths)
        if graphs := self.captured:
            # Cloned, as the next run of any graph overwrites its output.
            probs_BNV = graphs.run(self.passes.probs, filtered_BNV).clone()
        else:
            probs_BNV = probs_of_rows(filtered_BNV, self.sampling, self.model.execution.probs)
            probs_BNV = pad_vocabulary(probs_BNV, self.passes.vocab_size)
        return Output(probs_BNV, logits_BNV, filtered_BNV)

    @property
    def captured(self) -> GraphPool | None:
        """The CUDA graphs, if they can apply temperature, top-k, top-p and min-p of all rows."""
        form = self.passes.sampling.form
        is_known = all(row.temperature == 0 or row.form == form for row in self.sampling)
        return self.graphs if is_known else None

    def prepare(self, sequences: Rows, active: Active) -> None:
        """Before a step: active rows' accepted tokens go to a retrieval cache and text filters."""
        self.cache.take_committed(active)
        for filters, sequence, on in zip(self.text_filters, sequences, active, strict=True):
            if filters and on:
                filters.extend(sequence)

    def reset(self, b: int) -> None:
        self.cache.reset(b)
        self.set_sampling(b, SamplingParams())  # greedy, which captured passes can always apply

    def of_rows(self, rows: slice) -> Self:
        """A runner of a slice of the rows, on the same memory; not with CUDA graphs."""
        part = copy.copy(self)
        part.cache = self.cache.of_rows(rows)
        part.sampling = self.sampling[rows]
        part.text_filters = self.text_filters[rows]
        queries_LBTHD = self.passes.queries_LBTHD
        if queries_LBTHD is not None:
            queries_LBTHD = queries_LBTHD[:, rows]
        part.passes = replace(self.passes, cache=part.cache, queries_LBTHD=queries_LBTHD)
        return part

    def set_sampling(
        self, b: int, sampling: SamplingParams, text_filters: TextFilters | None = None
    ) -> None:
        self.sampling[b] = sampling
        self.text_filters[b] = text_filters
        if self.graphs:
            self.passes.numbers_B3[b] = torch.tensor(sampling.numbers, dtype=torch.float64)


class DraftRunner(ModelRunner):
    """A draft model that reads only a text's first and latest tokens, so prompts cost little."""

    cache: StreamingCache

    def prepare(self, sequences: Rows, active: Active) -> None:
        """Before a step: refills active rows that lack over `max_block` tokens; slides windows."""
        super().prepare(sequences, active)
        max_block = self.cache.settings.max_block
        for b, sequence in enumerate(sequences):
            if active[b] and len(sequence) - self.cache.num_tokens[b] > max_block:
                self._read_window(b, sequence[:-1])  # else the next draft reads them
        self.cache.slide()

    def draft(
        self, sequences: Rows, active: Active, N: int, source: RandomSource
    ) -> tuple[Tensor, Tensor]:
        rounds = self.passes.rounds
        graphs = self.captured
        if any(self.text_filters) or not (graphs or rounds):
            return super().draft(sequences, active, N, source)
        numbers_BN = source.numbers([N - 1] * len(active), [*map(len, sequences)], active)
        fresh = self.unread(sequences, active)
        size = self.cache.settings.max_block if self.graphs else max(map(len, fresh))  # few graphs
        packed_4BT = pack_block(self.model, fresh, self.cache, size)
        if rounds:
            guesses = rounds.draft(self, packed_4BT, numbers_BN)
        elif graphs:  # whoever verifies copies these before the next run of a graph overwrites them
            guesses = graphs.run(self.passes.draft, packed_4BT, numbers_BN)
        pairs = zip(fresh, active, strict=True)
        self.cache.advance([len(row) + N - 1 if on else 0 for row, on in pairs])
        return guesses

    def _read_window(self, b: int, tokens: list[int]) -> None:
        """Refills row b of the cache with the first (sinks) and the latest of these tokens."""
        settings = self.cache.settings
        sinks = settings.num_sink_tokens
        window = tokens[:sinks] + tokens[sinks:][-min(settings.num_recent_tokens, MOST_RECENT) :]
        self.cache.reset(b)
        read_block(self.model, [window], self.cache.row(b))
        self.cache.hold(b, len(window), len(tokens))
