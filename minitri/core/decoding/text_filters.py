"""Text filters: bias, penalties, a grammar and forbidden tokens, which depend on the text so far.

Text filters change the logits before `probs_from_logits` makes a distribution of them. So p at a
position is a function of the history alone, the same at every level, and speculation stays exact.

All levels of a row share one `TextFilters`, which has counted the committed tokens. Guesses after
these are given as a *path* for each place of a block; in a tree, a node's ancestors.
Legend: B rows, N places, V vocab, U tokens whose logits may change.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from minitri.core.decoding.verification import Active, Rows
from minitri.core.settings import SamplingParams


class Matcher(Protocol):
    """Interface of a row's grammar matcher, which says what tokens may come next."""

    @property
    def error(self) -> str:
        """Why the grammar's matcher has failed, in one line."""

    def extend(self, tokens: list[int]) -> None:
        """Advances the matcher by committed tokens of the text."""

    def forbidden(self, path: list[int]) -> Tensor | None:
        """Mask (V,) of tokens forbidden after the text and guesses `path`; None: it failed."""


class TextFilters:
    """Bias, penalties, grammar and forbidden tokens of one row, with counts of its tokens."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: list[int],
        vocab_size: int,
        *,
        end_tokens: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """Makes the filters of `params` for the text after a prompt. They also forbid `bad_words`
        (ids), what `matcher` forbids, and `end_tokens` in the first `params.min_tokens` tokens."""
        self.text = [*prompt]  # the committed tokens
        self.matcher = matcher
        self._params = params
        self._first = len(prompt)
        self._end_tokens = end_tokens
        self._bad_words = bad_words
        self._bias_V, self._in_prompt_V, self._counts_V = torch.zeros(3, vocab_size)
        for token, bias in dict(params.logit_bias).items():
            self._bias_V[token] = bias
        is_repetition = params.repetition_penalty != 1
        penalties = (params.presence_penalty, params.frequency_penalty)
        self._counts_output = is_repetition or any(penalties)
        if is_repetition:
            self._in_prompt_V[prompt] = 1
        # Kept, as to look for these tokens in each pass would read the whole vocabulary.
        self._may_change_V = (self._bias_V != 0) | (self._in_prompt_V > 0)

    def extend(self, sequence: list[int]) -> None:
        """Adds tokens of `sequence` after `self.text` to it, to the counts and the matcher."""
        new = sequence[len(self.text) :]
        self.text += new
        for token in new if self._counts_output else ():
            self._counts_V[token] += 1
            self._may_change_V[token] = True
        if new and self.matcher:
            self.matcher.extend(new)

    def apply(self, logits_NV: Tensor, paths: Rows) -> None:
        """Applies all filters to logits in place; `paths[n]` are the guesses before `logits_NV[n]`.
        A filter that would forbid all tokens is skipped: so the grammar wins over later ones."""
        self._penalise(logits_NV, paths)
        for logits_V, path in zip(logits_NV, paths, strict=True):
            if self.matcher:
                is_bad_V = self.matcher.forbidden(path)
                if is_bad_V is None:
                    logits_V.fill_(math.nan)
                    continue
                is_bad_V = is_bad_V[: len(logits_V)].to(logits_V.device)
                forbid(logits_V, logits_V.masked_fill(is_bad_V, -math.inf))
            if ids := [token for token in self._banned(path) if token < len(logits_V)]:
                ids_U = torch.tensor(ids, device=logits_V.device)
                forbid(logits_V, logits_V.index_fill(0, ids_U, -math.inf))

    def _banned(self, path: list[int]) -> list[int]:
        num_new = len(self.text) - self._first + len(path)
        tokens = [*self._end_tokens] if num_new < self._params.min_tokens else []
        latest = [*self.text[-max(map(len, self._bad_words), default=1) :], *path]
        for *before, last in self._bad_words:
            if latest[len(latest) - len(before) :] == before:
                tokens.append(last)
        return tokens

    def _penalise(self, logits_NV: Tensor, paths: Rows) -> None:
        """Adds bias and penalties to logits in place; row n follows the text and `paths[n]`."""
        counted = paths if self._counts_output else []
        V = logits_NV.shape[1]  # a drafter's vocabulary may be smaller
        guessed = [(n, token) for n, path in enumerate(counted) for token in path if token < V]
        rows, tokens = torch.tensor(guessed, dtype=torch.int64).view(-1, 2).unbind(1)
        self._may_change_V[tokens] = True
        ids_U = self._may_change_V[:V].nonzero().flatten()
        if not len(ids_U):
            return
        counts_NU = self._counts_V[ids_U].repeat(len(paths), 1)
        places = (rows, torch.searchsorted(ids_U, tokens.contiguous()))
        counts_NU.index_put_(places, torch.ones(()), accumulate=True)
        tensors = (self._bias_V[ids_U], self._in_prompt_V[ids_U], counts_NU)
        bias_U, in_prompt_U, counts_NU = (it.to(logits_NV) for it in tensors)
        ids_U = ids_U.to(logits_NV.device)
        x_NU = logits_NV.index_select(1, ids_U) + bias_U
        params = self._params
        if (penalty := params.repetition_penalty) != 1:
            is_new_NU = (counts_NU == 0) & (in_prompt_U == 0)
            x_NU = x_NU.where(is_new_NU, torch.where(x_NU > 0, x_NU / penalty, x_NU * penalty))
        # Each product is rounded by itself, so that the bits do not depend on the shape.
        if params.frequency_penalty:
            x_NU = x_NU - params.frequency_penalty * counts_NU
        if params.presence_penalty:
            x_NU = x_NU - params.presence_penalty * (counts_NU > 0).to(x_NU)
        logits_NV.index_copy_(1, ids_U, x_NU)


def forbid(logits_V: Tensor, left_V: Tensor) -> None:
    """Copies `left_V`, logits without some tokens, to `logits_V`; not if no token is left."""
    if left_V.amax() > -math.inf:
        logits_V.copy_(left_V)


def filtered_logits(
    logits_BNV: Tensor, filters: Sequence[TextFilters | None], paths: Sequence[Rows]
) -> Tensor:
    """A copy of logits after each row's filters. `paths[b][n]` are the tokens before place n of
    row b that its filters have not counted, see `paths_of`."""
    logits_BNV = logits_BNV.clone()
    for row_filters, logits_NV, row in zip(filters, logits_BNV, paths, strict=True):
        if row_filters and row:
            row_filters.apply(logits_NV[: len(row)], row)
    return logits_BNV


def paths_of(
    filters: Sequence[TextFilters | None],
    sequences: Rows,
    active: Active,
    blocks: Rows,
    above: Rows | None = None,
) -> list[Rows]:
    """For each row and place n of its block of guesses the tokens before it that its filters have
    not counted: new ones of its sequence, then `block[:n]` (trees: `block[i]`, i in `above[n]`).
    [] for rows that have no filters or are not active."""
    paths = list[Rows]()
    for row_filters, sequence, on, block in zip(filters, sequences, active, blocks, strict=True):
        row = Rows()
        if row_filters and on:
            start = sequence[len(row_filters.text) :]
            places = above or [[*range(n)] for n in range(len(block) + 1)]
            row = [[*start, *(block[i] for i in nodes)] for nodes in places]
        paths.append(row)
    return paths
