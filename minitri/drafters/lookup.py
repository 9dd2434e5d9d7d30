"""The drafter without a model: it looks the last words up, and guesses what followed them before.

It looks into the row's own text, prompt and output, and, if asked, into a history of earlier texts
and a datastore. The longest match wins, among equals that in the row's own text. How much of what
followed is guessed depends on the length of the match and on what became of the row's earlier
guesses. A guess is certain, so its distribution is one-hot: q(x) = 1. Where nothing matches it
guesses nothing.
"""

import math
import time
from dataclasses import dataclass, field
from typing import Protocol

import torch

from minitri.decoding.autotuner import Autotuner
from minitri.decoding.verification import Proposal
from minitri.drafters.datastore import Datastore
from minitri.drafters.text import GrowingText, History
from minitri.stats import LevelStats

LEAST_CHANCE = 0.05
"""A token is guessed only if the chance that it is accepted is larger: about the cost of one more
row in a pass of the target, as a share of it. 0.03 and 0.1 do as well, see tools/RESULTS.md."""


class Source(Protocol):
    """Something to look words up in."""

    def lookup(self, sequence: list[int], limit: int) -> tuple[int, list[int]]:
        """How many of the last tokens of `sequence` it has in this order, and what followed them
        there: at most `limit` tokens."""


@dataclass(frozen=True)
class Sources:
    """Where all rows look words up, beside their own texts."""

    history: History | None = None
    datastore: Datastore | None = None
    takes_turns: bool = False
    """Whether lookup takes turns with a model as the drafter, see `choice.py`; else the model, if
    there is one, is the only drafter."""

    @property
    def name(self) -> str:
        """The drafter that looks there, as `minitri.load` names it."""
        return "datastore" if self.datastore is not None else "suffix"

    def beside(self, model: str) -> str:
        """The name of the drafter beside a model, or of both; without one that of the lookup."""
        names = [self.name] if self.takes_turns or not model else []
        return ",".join([*names, model] if model else names)

    @property
    def all(self) -> list[Source]:
        return [source for source in (self.history, self.datastore) if source is not None]


@dataclass
class _Row:
    """A row's text, and what became of its guesses."""

    text: GrowingText = field(default_factory=GrowingText)
    outcomes: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """Tested and accepted guesses, by source and size of the match."""
    guess: list[int] = field(default_factory=list)
    """The guess behind the last certain token."""
    kind: tuple[int, int] = 0, 0
    """Source and size (a power of 2) of the match it came from."""
    rate: float = 0.0
    """The chance that a token of the latest guess is right."""

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens that are certain; learns from them whether the last guess was right."""
        known = min(len(tokens), len(self.guess))
        wrong = [a != b for a, b in zip(tokens[:known], self.guess[:known], strict=True)]
        accepted = [*wrong, True].index(True)
        tested, right = self.outcomes.get(self.kind, (0, 0))
        self.outcomes[self.kind] = tested + min(accepted + 1, known), right + accepted
        self.guess = []
        self.text.extend(tokens)

    def propose(self, sources: list[Source], sequence: list[int], gamma: int) -> list[int]:
        """Up to `gamma` guesses behind the certain tokens and the guesses in flight."""
        best, guess, kind = 0, list[int](), (0, 0)
        for number, source in enumerate((self.text, *sources)):
            length, followed = source.lookup(sequence, gamma)
            if length > best and followed:
                best, guess, kind = length, followed, (number, length.bit_length())
        if guess:
            # By the rule of succession; that `best` tokens agree is evidence of its own.
            tested, right = self.outcomes.get(kind, (0, 0))
            self.rate = (best + right) / (best + 2 + tested)
            guess = guess[: max(1, int(math.log(LEAST_CHANCE) / math.log(self.rate)))]
        if len(sequence) == len(self.text.tokens):
            self.guess, self.kind = guess, kind
        return guess


class LookupDrafter:
    """Lookup for B rows: a stage of the cascade, see `decoding.level.Stage`."""

    def __init__(
        self, batch_size: int, stats: LevelStats, tuner: Autotuner | None, sources: Sources, *,
        vocab_size: int, device: torch.device,
    ) -> None:  # fmt: skip
        """`tuner`, if there is one, is told what a guess takes."""
        self.stats = stats
        self.gamma = 1  # set before every step, see `Cascade`
        self._tuner = tuner
        self._sources = sources
        self._vocab_size = vocab_size
        self._device = device
        self._rows = [_Row() for _ in range(batch_size)]

    def prepare(self, sequences: list[list[int]], active: list[bool]) -> None:
        """Learns the tokens that became certain since it was last used."""
        for row, sequence, on in zip(self._rows, sequences, active, strict=True):
            if on:
                row.extend(sequence[len(row.text.tokens) :])

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """Up to `gamma` tokens for each active row, none where nothing matches."""
        started = time.perf_counter()
        sources = self._sources.all
        tokens = [
            row.propose(sources, sequence, self.gamma) if on else []
            for row, sequence, on in zip(self._rows, sequences, active, strict=True)
        ]
        shape = (len(tokens), max(map(len, tokens)), self._vocab_size)
        probs_BNV = torch.zeros(shape, device=self._device)
        proposal = Proposal.of(tokens, probs_BNV, [[self.stats.name] * len(row) for row in tokens])
        probs_BNV.scatter_(2, proposal.tokens_BN.unsqueeze(2), 1.0)
        seconds = time.perf_counter() - started
        self.stats.seconds += seconds
        if self._tuner is not None:
            self._tuner.note_round(self.stats.name, 0, seconds / self.gamma)
        return proposal

    def switch_off(self) -> None:
        """Never called: its distributions are one-hot."""

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def rate(self, b: int) -> float:
        """The chance that a token of the latest guess for row b is right."""
        return self._rows[b].rate

    def crop(self, lengths: list[int]) -> None:
        """Nothing to do: only tokens that are certain are kept."""

    def reset(self, b: int) -> None:
        """Drops row b's tokens; a history, if there is one, keeps them."""
        if self._sources.history is not None and self._rows[b].text.tokens:
            self._sources.history.learn(self._rows[b].text.tokens)
        self._rows[b] = _Row()
