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

from minitri.decoding.verification import Active, Rows
from minitri.settings import SamplingParams


class Matcher(Protocol):
    """Knows which tokens a grammar allows next; see `filters/matcher.py`."""

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens that are certain."""

    def allowed(self, path: list[int]) -> Tensor | None:
        """Which tokens (V,) may follow the certain ones and these; None where it has given up."""

    @property
    def error(self) -> str:
        """Why it has given up, in one line."""


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
        self._first = len(prompt)
        self._min_tokens = params.min_tokens
        self._end_tokens = [*end_tokens]
        self._last_of = defaultdict[tuple[int, ...], list[int]](list)  # by the tokens before it
        for word in bad_words:
            self._last_of[tuple(word[:-1])].append(word[-1])
        self._sizes = sorted({len(before) for before in self._last_of})
        self._matcher = matcher
        self._penalties = Penalties(params, prompt, vocab_size)

    def extend(self, sequence: list[int]) -> None:
        """Takes in what a text, which begins like the one so far, has more."""
        if new := sequence[len(self.text) :]:
            self.text += new
            self._penalties.add(new)
            if self._matcher is not None:
                self._matcher.extend(new)

    @property
    def error(self) -> str:
        """Why the row cannot go on, if that is for its grammar; else empty."""
        return self._matcher.error if self._matcher is not None else ""

    def apply(self, logits_NV: Tensor, paths: Rows) -> None:
        """Changes the logits after each path, in place. Forbidden tokens get minus infinity. What
        would forbid all tokens is not applied: so a grammar comes before bad words and the least
        number of tokens, and does not hold for a drafter that has none of the tokens it allows."""
        self._penalties.apply(logits_NV, paths)
        for logits_V, path in zip(logits_NV, paths, strict=True):
            if self._matcher is not None:
                allowed_V = self._matcher.allowed(path)
                if allowed_V is None:
                    logits_V.fill_(math.nan)
                    continue
                allowed_V = allowed_V[: len(logits_V)].to(logits_V.device)
                _keep(logits_V, logits_V.masked_fill(~allowed_V, -math.inf))
            if ids := [token for token in self._forbidden(path) if token < len(logits_V)]:
                ids_U = torch.tensor(ids, device=logits_V.device)
                _keep(logits_V, logits_V.index_fill(0, ids_U, -math.inf))

    def _forbidden(self, path: list[int]) -> list[int]:
        """What may not follow, whatever the grammar says."""
        num_new = len(self.text) - self._first + len(path)
        tokens = [*self._end_tokens] if num_new < self._min_tokens else []
        if self._sizes:
            latest = [*self.text[-self._sizes[-1] :], *path]
            for size in self._sizes:
                tokens += self._last_of.get(tuple(latest[len(latest) - size :]), ())
        return tokens


def _keep(logits_V: Tensor, filtered_V: Tensor) -> None:
    """Takes over filtered logits, unless no token is left."""
    if filtered_V.amax() > -math.inf:
        logits_V.copy_(filtered_V)


class Penalties:
    """Bias and penalties of one row: the tokens that have some, and how often they stand there."""

    def __init__(self, params: SamplingParams, prompt: list[int], vocab_size: int) -> None:
        self._params = params
        self._counts_output = bool(params.presence_penalty or params.frequency_penalty)
        self._counts_output |= params.repetition_penalty != 1
        self._ids_V = torch.zeros(vocab_size, dtype=torch.int64)  # as many as have places
        self._bias_V = torch.zeros(vocab_size)
        self._in_prompt_V = torch.zeros(vocab_size)
        self._counts_V = torch.zeros(vocab_size)
        seen = sorted({*prompt}) if params.repetition_penalty != 1 else []
        self._places = {token: place for place, token in enumerate(seen)}
        self._ids_V[: len(seen)] = torch.tensor(seen, dtype=torch.int64)
        self._in_prompt_V[: len(seen)] = 1
        for token, bias in dict(params.logit_bias).items():
            self._bias_V[self._place(token)] = bias

    def _place(self, token: int) -> int:
        """Where a token has its numbers; a rejected guess has zeros there."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            self._ids_V[place] = token
        return place

    def add(self, tokens: list[int]) -> None:
        """Counts tokens of the output that are certain."""
        for token in tokens if self._counts_output else ():
            self._counts_V[self._place(token)] += 1

    def apply(self, logits_NV: Tensor, paths: Rows) -> None:
        """Changes the logits after each path, in place."""
        counted = paths if self._counts_output else []
        guessed = [(n, self._place(it)) for n, path in enumerate(counted) for it in path]
        U = len(self._places)
        if not U:
            return
        counts_NU = self._counts_V[:U].repeat(len(paths), 1)
        if guessed:
            rows, places = torch.tensor(guessed).unbind(1)
            counts_NU.index_put_((rows, places), torch.ones(()), accumulate=True)
        numbers = [self._bias_V[:U], self._in_prompt_V[:U], counts_NU]
        numbers = [it.to(logits_NV) for it in numbers]
        ids_U = self._ids_V[:U].to(logits_NV.device)
        if (is_known_U := ids_U < logits_NV.shape[1]).logical_not().any():  # by a drafter
            ids_U = ids_U[is_known_U]
            numbers = [it[..., is_known_U] for it in numbers]
        logits_NV[:, ids_U] = penalised(logits_NV[:, ids_U], self._params, *numbers)


def penalised(
    logits_NU: Tensor,
    params: SamplingParams,
    bias_U: Tensor,
    in_prompt_U: Tensor,
    counts_NU: Tensor,
) -> Tensor:
    """Logits with bias and penalties, by which tokens stand in the prompt and how often each stands
    in the output: in the order of vLLM and `transformers`, with OpenAI's meaning."""
    x_NU = logits_NU + bias_U
    if (penalty := params.repetition_penalty) != 1:
        seen_NU = (counts_NU > 0) | (in_prompt_U > 0)
        x_NU = x_NU.where(~seen_NU, torch.where(x_NU > 0, x_NU / penalty, x_NU * penalty))
    # Each product is rounded by itself, so that the bits do not depend on the shape.
    x_NU = x_NU - params.frequency_penalty * counts_NU
    return x_NU - params.presence_penalty * (counts_NU > 0).to(x_NU)


def filtered_logits(
    logits_BNV: Tensor, filters: Sequence[TextFilters | None], paths: Sequence[Rows]
) -> Tensor:
    """A copy of the logits of B rows, changed by the filters that a row has; `paths` as there."""
    logits_BNV = logits_BNV.clone()
    for own, logits_NV, row in zip(filters, logits_BNV, paths, strict=True):
        if own is not None:
            own.apply(logits_NV[: len(row)], row)
    return logits_BNV


def paths_of(
    filters: Sequence[TextFilters | None], sequences: Rows, active: Active, guesses: Rows
) -> list[Rows]:
    """The paths of rows that guess chains; none of rows without filters, or not active."""
    found = list[Rows]()
    for own, sequence, on, tokens in zip(filters, sequences, active, guesses, strict=True):
        after = [*sequence[len(own.text) :], *tokens] if own is not None and on else []
        first = len(after) - len(tokens)
        found.append([after[:n] for n in range(first, len(after) + 1)] if own and on else [])
    return found


def tree_paths(
    filters: Sequence[TextFilters | None],
    sequences: Rows,
    active: Active,
    blocks: Rows,
    above: Rows,
) -> list[Rows]:
    """The same for trees: node n of each row has these places of its block `above` it, its own is
    the last of them."""
    starts = paths_of(filters, sequences, active, [[]] * len(active))
    return [
        [[*start, *(block[i] for i in places)] for start in row for places in above]
        for row, block in zip(starts, blocks, strict=True)
    ]
