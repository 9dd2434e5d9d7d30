"""Two drafters that take turns, a lookup and a model: every round, every row asks one of them.

It asks the one that promises more tokens per second. What a row's lookup would guess is known
before: it draws nothing, so its guess is certain given the text and the guesses in flight. The
chance that it is right is counted from the certain text, whoever was asked. The model's acceptance
rate is a moving average of its own guesses about this row; the longer it was not asked, the better
it looks, as for the autotuner, from which the costs come. So the choice follows from counts and
times of the past and from what stands in front of the guesses, and is made before the model draws:
each token was sampled from the q that is stated for it, given everything before it.

Rows choose by themselves, so a row's text does not depend on its neighbors.
"""

from dataclasses import dataclass

from torch.nn.utils.rnn import pad_sequence

from minitri.decoding.autotuner import (
    EXPLORATION,
    FIRST_RATES,
    FIRST_TESTED,
    MEMORY,
    Autotuner,
    expected_tokens,
)
from minitri.decoding.level import Stage
from minitri.decoding.verification import Proposal
from minitri.drafters.lookup import LookupDrafter
from minitri.errors import InputError
from minitri.stats import LevelStats


@dataclass
class _Row:
    """What became of the model's guesses about a row."""

    tested: float = FIRST_TESTED
    accepted: float = FIRST_TESTED * FIRST_RATES["draft"]
    """Guesses; older ones weigh less."""
    num_unused: int = 0
    """Rounds since it was asked."""
    num_certain: int = 0
    """Tokens of the text when the step began."""
    pending: tuple[int, int, int] | None = None
    """Of the guesses that were not verified yet: who made them, where they start, how many."""


class DrafterChoice:
    """A lookup and a model that take turns: a stage of the cascade, see `decoding.level.Stage`."""

    def __init__(self, tree: str, lookup: LookupDrafter, model: Stage, tuner: Autotuner) -> None:
        """Raises `InputError` if a `tree` is wanted: what both guess are chains."""
        if tree:
            raise InputError(f"tree is {tree}, but drafters that take turns guess chains; give one")
        self.stats = model.stats
        self.by_drafter = [lookup.stats, LevelStats(model.stats.name)]
        """What became of the guesses of each."""
        self.gamma = 1  # set before every step, see `Cascade`
        self._members = (lookup, model)
        self._lookup, self._model, self._tuner = lookup, model, tuner
        self._rows = [_Row() for _ in range(lookup.num_rows)]
        self._unprepared: list[bool] | None = None

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """Shows the lookup what is certain; the model, which reads it, not until it is asked."""
        for row, sequence in zip(self._rows, sequences, strict=True):
            row.num_certain = len(sequence)
        self._lookup.prepare(sequences, active)
        self._unprepared = active

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """The lookup's guesses for some rows, the model's for the others."""
        self._lookup.gamma = self._model.gamma = self.gamma
        found = self._lookup.propose(sequences, active)
        asked = [on and self._asks_model(b, found.counts[b]) for b, on in enumerate(active)]
        proposal = _merged(found, self._draw(sequences, asked), asked) if any(asked) else found
        for b, row in enumerate(self._rows):
            if active[b]:
                row.num_unused = 0 if asked[b] else row.num_unused + 1
                row.pending = int(asked[b]), len(sequences[b]), proposal.counts[b]
        return proposal

    def _asks_model(self, b: int, num_found: int) -> bool:
        """Whether the model promises more than the lookup's guesses about row b."""
        row, seconds = self._rows[b], self._tuner.round_seconds
        by_lookup = expected_tokens(self._lookup.rate(b), num_found) / seconds(0, num_found)
        drawn = expected_tokens(row.accepted / row.tested, self.gamma)
        by_model = drawn / seconds(self.gamma, self.gamma)
        return by_model * EXPLORATION ** min(row.num_unused, 10_000) > by_lookup

    def _draw(self, sequences: list[list[int]], asked: list[bool]) -> Proposal:
        """The model's guesses. What it reads before the first ones of a step is what was certain
        then, since a window may slide there only."""
        if self._unprepared is not None:
            pairs = zip(sequences, self._rows, strict=True)
            certain = [sequence[: row.num_certain] for sequence, row in pairs]
            self._model.prepare(certain, self._unprepared)
            self._unprepared = None
        return self._model.propose(sequences, asked)

    def switch_off(self) -> None:
        """The model guesses no more; asking it costs nothing then."""
        self._model.switch_off()

    def crop(self, lengths: list[int]) -> None:
        """Drops what both know of rejected tokens; behind guesses this is the verdict on them."""
        for row, length in zip(self._rows, lengths, strict=True):
            if row.pending is not None:
                self._learn(row, *row.pending, length)
                row.pending = None
        for member in self._members:
            member.crop(lengths)

    def _learn(self, row: _Row, who: int, start: int, num_guesses: int, length: int) -> None:
        num_accepted = min(length - start, num_guesses)
        num_tested = self.by_drafter[who].record(num_guesses, num_accepted)
        if self._members[who] is self._model:  # no guess at all counts as one that was rejected
            row.tested = MEMORY * row.tested + max(num_tested, 1)
            row.accepted = MEMORY * row.accepted + num_accepted

    def reset(self, b: int) -> None:
        self._rows[b] = _Row()
        for member in self._members:
            member.reset(b)


def _merged(found: Proposal, drawn: Proposal, asked: list[bool]) -> Proposal:
    """The rows of one proposal that were asked for, and the others of the other."""
    chosen = [(drawn if is_asked else found, b) for b, is_asked in enumerate(asked)]
    counts = [proposal.counts[b] for proposal, b in chosen]
    origins = [proposal.origins[b] for proposal, b in chosen]
    tokens = [proposal.tokens_BN[b, :n] for (proposal, b), n in zip(chosen, counts, strict=True)]
    probs = [proposal.probs_BNV[b, :n] for (proposal, b), n in zip(chosen, counts, strict=True)]
    tokens_BN, probs_BNV = (pad_sequence(rows, batch_first=True) for rows in (tokens, probs))
    return Proposal(counts, tokens_BN, probs_BNV, origins)
