"""User drafters: the `Drafter` protocol, and the stage of the cascade that calls one.

    class Echo:  # guesses the last token but one; give minitri.load(..., drafter=Echo())
        def guess(self, tokens, row):
            return tokens[-2] if len(tokens) > 1 else None

A drafter cannot change a text's distribution. Its errors end the run. Legend: B rows, V vocab.
"""

import copy
from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from minitri.core.decoding.level import Stage
from minitri.core.decoding.random_source import RandomSource
from minitri.core.decoding.sampling import probs_of_rows
from minitri.core.decoding.text_filters import filtered_logits, paths_of
from minitri.core.decoding.verification import Active, Proposal, Rows
from minitri.core.errors import explain
from minitri.core.runner import ModelRunner
from minitri.core.stats import Meter

TOLERANCE = 1e-3  # allowed difference of a sum of probabilities from 1, due to bfloat16


class Drafter(Protocol):
    """Interface of a user's drafter, given as an object to `minitri.load(..., drafter=...)`."""

    def guess(self, tokens: list[int], row: int) -> int | Tensor | Sequence[float] | None:
        """Guesses the next token: an id, or a distribution (V,); None ends the round.
        `tokens` are the prompt, the output and the guesses so far of text number `row`. A later
        call for the row may continue them, drop rejected guesses, or begin another text."""


class PluggedDrafter(Stage):
    """Stage that samples from a user's `Drafter` by each row's settings and filters in `target`."""

    def __init__(
        self, meter: Meter, target: ModelRunner, source: RandomSource, drafter: Drafter
    ) -> None:
        super().__init__("draft", meter)
        self._drafter = drafter
        self._source = source
        self._target = target
        self._no_guess_V = torch.zeros(target.passes.vocab_size, device=target.model.device)
        self._first = 0  # row of the batch that is row 0 here

    def propose(self, sequences: Rows, active: Active) -> Proposal:
        probs = list[Tensor]()
        guesses: Rows = [[] for _ in sequences]
        with self.timed_round(num_tokens=self.gamma):
            for _ in range(self.gamma):
                texts = [[*text, *new] for text, new in zip(sequences, guesses, strict=True)]
                rows = [self._ask(text, b) if active[b] else None for b, text in enumerate(texts)]
                active = [row is not None for row in rows]
                if not any(active):
                    break
                logits_BV = torch.stack([self._no_guess_V if row is None else row for row in rows])
                filters = self._target.text_filters
                paths = paths_of(filters, texts, active, [[]] * len(texts))
                logits_B1V = filtered_logits(logits_BV.unsqueeze(1), filters, paths)
                probs.append(probs_of_rows(logits_B1V, self._target.sampling).squeeze(1))
                tokens_B = self._source.sample(probs[-1], [len(text) for text in texts], active)
                for row_guesses, token, on in zip(guesses, tokens_B.tolist(), active, strict=True):
                    row_guesses += [token] * on
        if not probs:
            return Proposal.nothing(len(sequences))
        return Proposal.of(guesses, torch.stack(probs, 1), self.name)

    def _ask(self, tokens: list[int], b: int) -> Tensor | None:
        """The user's guess in row b after `tokens`, as log-probabilities (V,); None: no guess."""
        name = type(self._drafter).__name__
        with explain(f"the drafter {name} gave no valid guess", "correct it"):
            answer = self._drafter.guess(tokens, self._first + b)
            if answer is None:
                return None
            vocab_size = len(self._no_guess_V)
            if isinstance(answer, int):
                answer = torch.nn.functional.one_hot(torch.tensor(answer), vocab_size)
            probs_V = torch.as_tensor(answer).to(self._no_guess_V)
            is_valid = probs_V.shape == self._no_guess_V.shape and probs_V.min() >= 0
            if not (is_valid and abs(float(probs_V.sum()) - 1) < TOLERANCE):
                raise ValueError(f"give a token below {vocab_size}, or as many probabilities")
        return probs_V.log()

    def of_rows(self, rows: slice) -> Self:
        part = copy.copy(self)
        part._source = self._source.of_rows(rows)
        part._target = self._target.of_rows(rows)
        part._first = rows.start
        return part
