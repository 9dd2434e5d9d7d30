"""Filters that look at a text: bias, penalties, forbidden tokens and a grammar.

They change the logits of a position by what stands before it, the prompt, the output and the
guesses in flight, before `probs_from_logits` makes a distribution of them. So p at a position is a
function of that position's own history, at every level alike, and what is proved of proposals holds
for them. Only tokens that stand in a text, or have a bias, get other logits by a penalty; these few
are gathered, changed and put back.

A row has one object for all levels, which counts what is certain; what is not comes as *paths*: the
tokens after the certain ones at each place of a block, in a tree those of a node's ancestors.

Legend: B rows, N places, V vocab, U tokens whose logits may change.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from minitri.core.decoding.verification import Active, Rows
from minitri.core.settings import SamplingParams


class Matcher(Protocol):
    """Masks of one row's grammar: which tokens may come next."""

    @property
    def error(self) -> str:
        """Why the matcher has given up, in one line."""

    def extend(self, tokens: list[int]) -> None:
        """Appends committed tokens."""

    def forbidden(self, path: list[int]) -> Tensor | None:
        """Which tokens (V,) may not follow the committed ones and `path`; None: it has given up."""

    def forced(self, path: list[int]) -> list[int]:
        """The text that must follow `path`, as the tokenizer would cut it into tokens."""


class TextFilters:
    """The filters of one row that look at its text, and what they know of that."""

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
        """`bad_words` are those of the settings as tokens."""
        self.text = [*prompt]
        """The tokens that are certain."""
        self.matcher = matcher
        self._params = params
        self._first = len(prompt)
        self._end_tokens = [*end_tokens]
        self._last_of = defaultdict[tuple[int, ...], list[int]](list)  # by the tokens before it
        for word in bad_words:
            self._last_of[tuple(word[:-1])].append(word[-1])
        self._sizes = sorted({len(before) for before in self._last_of})
        # The tokens with a bias, or in the text if that counts, have places in these.
        self._places: dict[int, int] = {}
        self._ids_V = torch.zeros(vocab_size, dtype=torch.int64)
        self._bias_V, self._in_prompt_V, self._counts_V = torch.zeros(3, vocab_size)
        for token, bias in dict(params.logit_bias).items():
            self._bias_V[self._place(token)] = bias
        is_repetition = params.repetition_penalty != 1
        self._counts_output = bool(
            is_repetition or params.presence_penalty or params.frequency_penalty
        )
        for token in sorted({*prompt}) if is_repetition else ():
            self._in_prompt_V[self._place(token)] = 1

    def extend(self, sequence: list[int]) -> None:
        """Takes in what a text, which begins like the one so far, has more."""
        new = sequence[len(self.text) :]
        self.text += new
        for token in new if self._counts_output else ():
            self._counts_V[self._place(token)] += 1
        if new and self.matcher is not None:
            self.matcher.extend(new)

    def apply(self, logits_NV: Tensor, paths: Rows) -> None:
        """Changes the logits after each path, in place. Forbidden tokens get minus infinity. What
        would forbid all tokens is not applied: so a grammar comes before bad words and the least
        number of tokens, and does not hold for a drafter that has none of the tokens it allows."""
        self._penalise(logits_NV, paths)
        for logits_V, path in zip(logits_NV, paths, strict=True):
            if self.matcher is not None:
                is_bad_V = self.matcher.forbidden(path)
                if is_bad_V is None:
                    logits_V.fill_(math.nan)
                    continue
                is_bad_V = is_bad_V[: len(logits_V)].to(logits_V.device)
                left_V = logits_V.masked_fill(is_bad_V, -math.inf)
                if left_V.amax() > -math.inf:
                    logits_V.copy_(left_V)
            if ids := [token for token in self._banned(path) if token < len(logits_V)]:
                ids_U = torch.tensor(ids, device=logits_V.device)
                before_U = logits_V[ids_U]
                logits_V[ids_U] = -math.inf
                if logits_V.amax() == -math.inf:
                    logits_V[ids_U] = before_U

    def _banned(self, path: list[int]) -> list[int]:
        """What may not follow, whatever the grammar says."""
        num_new = len(self.text) - self._first + len(path)
        tokens = [*self._end_tokens] if num_new < self._params.min_tokens else []
        if self._sizes:
            latest = [*self.text[max(0, len(self.text) - self._sizes[-1]) :], *path]
            for size in self._sizes:
                tokens += self._last_of.get(tuple(latest[len(latest) - size :]), ())
        return tokens

    def _penalise(self, logits_NV: Tensor, paths: Rows) -> None:
        counted = paths if self._counts_output else []
        guessed = [(n, self._place(it)) for n, path in enumerate(counted) for it in path]
        U = len(self._places)
        if not U:
            return
        counts_NU = self._counts_V[:U]
        if guessed:
            counts_NU = counts_NU.repeat(len(paths), 1)
            where = torch.tensor(guessed).unbind(1)
            counts_NU.index_put_(where, torch.ones(()), accumulate=True)
        ids_U = self._ids_V[:U].to(logits_NV.device)
        numbers = [self._bias_V[:U], self._in_prompt_V[:U], counts_NU]
        numbers = [it.to(logits_NV) for it in numbers]
        if logits_NV.shape[1] < len(self._ids_V):  # of a drafter
            is_known_U = ids_U < logits_NV.shape[1]
            ids_U = ids_U[is_known_U]
            numbers = [it[..., is_known_U] for it in numbers]
        x_NU = penalised(logits_NV.index_select(1, ids_U), self._params, *numbers)
        logits_NV.index_copy_(1, ids_U, x_NU)

    def _place(self, token: int) -> int:
        """Where a token has its numbers; a rejected guess has zeros there."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            self._ids_V[place] = token
        return place


def penalised(
    x_NU: Tensor, params: SamplingParams, bias_U: Tensor, in_prompt_U: Tensor, counts_NU: Tensor
) -> Tensor:
    """Logits with bias and penalties, by which tokens stand in the prompt and how often each stands
    in the output: in the order of vLLM and `transformers`, with OpenAI's meaning."""
    x_NU = x_NU + bias_U
    if (penalty := params.repetition_penalty) != 1:
        is_new_NU = (counts_NU == 0) & (in_prompt_U == 0)
        x_NU = x_NU.where(is_new_NU, torch.where(x_NU > 0, x_NU / penalty, x_NU * penalty))
    # Each product is rounded by itself, so that the bits do not depend on the shape.
    if params.frequency_penalty:
        x_NU = x_NU - params.frequency_penalty * counts_NU
    if params.presence_penalty:
        x_NU = x_NU - params.presence_penalty * (counts_NU > 0).to(x_NU)
    return x_NU


def filtered_logits(
    logits_BNV: Tensor, filters: Sequence[TextFilters | None], paths: Sequence[Rows]
) -> Tensor:
    """A copy of the logits of B rows, changed by the filters that a row has; `paths` as there."""
    logits_BNV = logits_BNV.clone()
    for own, logits_NV, row in zip(filters, logits_BNV, paths, strict=True):
        if own is not None and row:
            own.apply(logits_NV[: len(row)], row)
    return logits_BNV


def paths_of(
    filters: Sequence[TextFilters | None],
    sequences: Rows,
    active: Active,
    blocks: Rows,
    above: Rows | None = None,
) -> list[Rows]:
    """The paths of active rows that have filters. A block is guesses after a sequence; in a tree
    node n follows those at the places `above[n]` of its block, else place n the first n."""
    found = list[Rows]()
    for own, sequence, on, block in zip(filters, sequences, active, blocks, strict=True):
        paths = Rows()
        if own is not None and on:
            start = sequence[len(own.text) :]
            places = above or [[*range(n)] for n in range(len(block) + 1)]
            paths = [[*start, *(block[i] for i in nodes)] for nodes in places]
        found.append(paths)
    return found


def forced_of(filters: Sequence[TextFilters | None], sequences: Rows, active: Active) -> Rows:
    """Of active rows with a grammar the text that it forces after a sequence. Only a guess: a cut
    into tokens which the distribution may not choose."""
    paths = paths_of(filters, sequences, active, [[]] * len(sequences))
    matchers = [own.matcher if own is not None else None for own in filters]
    return [it.forced(*row) if it and row else [] for it, row in zip(matchers, paths, strict=True)]
