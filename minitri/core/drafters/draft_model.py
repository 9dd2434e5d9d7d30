"""The draft model: guesses chains with a streaming cache, a whole round in one call if possible.
Legend: B rows, N guesses of a round, T tokens of a block, V vocab.
"""

from torch import Tensor

from minitri.core.caches.streaming import StreamingCache
from minitri.core.decoding.random_source import CoupledSource, RandomSource
from minitri.core.decoding.verification import Active, Rows
from minitri.core.model.block import pack_block, read_block
from minitri.core.runner import ModelRunner

MOST_RECENT = 124  # tokens that are reread; twice as many raised acceptance by less than 0.001


class DraftRunner(ModelRunner):
    """A draft model over a streaming cache: a prompt of any length costs it one short pass."""

    cache: StreamingCache

    def prepare(self, sequences: Rows, active: Active) -> None:
        """Slides the windows before a step; rereads rows that lack more than a block of tokens."""
        super().prepare(sequences, active)
        max_block = self.cache.settings.max_block
        for b, sequence in enumerate(sequences):
            if active[b] and len(sequence) - self.cache.num_tokens[b] > max_block:
                self._read_window(b, sequence[:-1])
        self.cache.slide()

    def draft(
        self, sequences: Rows, active: Active, N: int, source: RandomSource
    ) -> tuple[Tensor, Tensor]:
        """Drafts as a `ModelRunner`, but in one call if there are graphs or kernels for that."""
        draft_round = self.model.execution.draft_round
        # A call of compiled kernels takes uniform numbers, not noise.
        is_one_call = draft_round and not isinstance(source, CoupledSource)
        is_captured = self.graphs and self.has_captured_filters
        if any(self.text_filters) or not (is_captured or is_one_call):
            return super().draft(sequences, active, N, source)
        starts = [len(sequence) for sequence in sequences]
        numbers_BN = source.numbers([N - 1] * len(starts), starts, active)
        fresh = self.unread(sequences, active)
        if self.graphs:
            size = self.cache.settings.max_block  # one size, so that graphs are few
            packed_4BT = pack_block(self.model, fresh, self.cache, size)
            output = self.graphs.run(self.passes.draft, packed_4BT, numbers_BN)
            tokens_BN, probs_BNV = (tensor.clone() for tensor in output)  # replays overwrite it
        else:
            assert draft_round
            V = self.passes.vocab_size
            tokens_BN, probs_BNV = draft_round(self.cache, fresh, numbers_BN, self.sampling, V)
        pairs = zip(fresh, active, strict=True)
        self.cache.advance([len(row) + N - 1 if on else 0 for row, on in pairs])
        return tokens_BN, probs_BNV

    def _read_window(self, b: int, tokens: list[int]) -> None:
        """Refills row b of the cache with the first (sinks) and the latest of these tokens."""
        settings = self.cache.settings
        sinks = settings.num_sink_tokens
        num_recent = min(settings.num_recent_tokens, MOST_RECENT)
        window = tokens[:sinks] + tokens[sinks:][-num_recent:]
        self.cache.reset(b)
        read_block(self.model, [window], self.cache.row(b))
        self.cache.hold(b, len(window), len(tokens))
