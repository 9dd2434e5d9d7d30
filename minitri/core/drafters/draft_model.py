"""The draft model: guesses chains with a streaming cache, a whole round in one call if possible.
Legend: B rows, N guesses of a round, T tokens of a block, V vocab.
"""

from collections.abc import Callable, Iterable

from torch import Tensor

from minitri.core.caches.streaming import StreamingCache
from minitri.core.decoding.level import Level
from minitri.core.decoding.verification import Active, Proposal, Rows
from minitri.core.model.block import pack_block, read_block
from minitri.core.runner import ModelRunner
from minitri.core.settings import SpeculationConfig, StepPlan


class DraftRunner(ModelRunner):
    """A draft model over a streaming cache: a prompt of any length costs it one short pass."""

    cache: StreamingCache

    def prepare(self, sequences: Rows, active: Active) -> None:
        """Before a step: slides the windows; rereads rows that lack more than a block of tokens."""
        super().prepare(sequences, active)
        max_block = self.cache.settings.max_block
        for b, sequence in enumerate(sequences):
            if active[b] and len(sequence) - self.cache.num_tokens[b] > max_block:
                self._read_window(b, sequence[:-1])
        self.cache.slide()

    def guess(self, sequences: Rows, active: Active, numbers_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Drafts N tokens (B, N) of each row, by distributions (B, N, V), which it also returns."""
        fresh = self.unread(sequences, active)
        N = numbers_BN.shape[1]
        if self.graphs:
            size = self.cache.settings.max_block  # one size, so that graphs are few
            packed_4BT = pack_block(self.model, fresh, self.cache, size)
            output = self.graphs.run(self.passes.round, packed_4BT, numbers_BN)
            tokens_BN, probs_BNV = (tensor.clone() for tensor in output)  # replays overwrite it
        else:
            guess = self.model.execution.round
            assert guess
            V = self.passes.vocab_size
            tokens_BN, probs_BNV = guess(self.cache, fresh, numbers_BN, self.sampling, V)
        pairs = zip(fresh, active, strict=True)
        self.cache.advance([len(row) + N - 1 if on else 0 for row, on in pairs])
        return tokens_BN, probs_BNV

    def _read_window(self, b: int, tokens: list[int]) -> None:
        """Refills row b of the cache with the first (sinks) and the latest of these tokens."""
        settings = self.cache.settings
        sinks = settings.num_sink_tokens
        window = tokens[:sinks] + tokens[sinks:][-settings.num_recent_tokens :]
        self.cache.reset(b)
        read_block(self.model, [window], self.cache.row(b))
        self.cache.hold(b, len(window), len(tokens))


class CapturedDraft(Level):
    """A draft model as the lowest level, which guesses a whole round in one CUDA graph or call."""

    runner: DraftRunner

    def capture(self, plans: Iterable[StepPlan]) -> None:
        B = len(self.runner.sampling)
        nobody = [False] * B
        for gamma1 in {plan.gamma1 for plan in plans if plan.uses_drafter}:
            numbers_BN = self.source.numbers([gamma1 - 1] * B, [0] * B, nobody)
            self.runner.guess([[0]] * B, nobody, numbers_BN)

    def _draft(self, sequences: Rows, active: Active) -> Proposal:
        if any(self.runner.text_filters):
            return super()._draft(sequences, active)
        starts = [len(sequence) for sequence in sequences]
        numbers_BN = self.source.numbers([self.gamma - 1] * len(starts), starts, active)
        self.stats.num_rounds += self.gamma * sum(active)
        with self._meter.round(self.stats, num_tokens=self.gamma):
            guesses = self.runner.guess(sequences, active, numbers_BN)
        return self.drafted(*guesses, active)


LevelType = Callable[[SpeculationConfig, ModelRunner], type[Level]]  # chooses a level's class


def chain_level(speculation: SpeculationConfig, runner: ModelRunner) -> type[Level]:
    """Class of a level that guesses chains, a round per call if it can."""
    assert not speculation.tree  # for which `Models.level_type` is that of `minitri.trees`
    # A call of compiled kernels takes uniform numbers, not noise.
    is_one_call = runner.model.execution.round and not speculation.coupled
    is_at_once = isinstance(runner, DraftRunner) and (runner.graphs or is_one_call)
    return CapturedDraft if is_at_once else Level
