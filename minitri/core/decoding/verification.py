"""Speculative sampling: what a stage proposes, and the rules by which a level verifies it.

A proposal is tokens together with the distributions q that they were really sampled from. A rule
accepts or replaces them such that every emitted token follows the verifier's distribution p
exactly: `verify` tests token by token, `verify_block`, the default, all tokens of a row together,
and `verify_coupled` compares them with the verifier's own tokens under common random numbers.

Rules are pure functions of tensors, random numbers included; in a round the host waits only for
the verdict. Legend: B rows, N guesses (p and numbers have N + 1), V vocab.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.core.decoding.sampling import gumbel_argmax, sample

Rows = list[list[int]]  # tokens on the host, one list for each row of the batch
Active = list[bool]  # for each row of the batch whether it takes part


@dataclass(frozen=True)
class Proposal:
    """Guesses for every row, with the distributions that they were sampled from."""

    counts: list[int]  # number n of guesses of each row
    tokens_BN: Tensor  # row b's tokens x_1 .. x_n; padded after n, N being the largest
    probs_BNV: Tensor
    """q_1 .. q_n of each row: q_i is the distribution of x_i given everything before it."""
    origins: list[list[str]]  # the stage that guessed each token, for display
    failed: Collection[int] = field(default=frozenset(), kw_only=True)
    """Rows for which a stage that guesses met distributions that are not finite."""

    @classmethod
    def of(
        cls, tokens: Rows, probs_BNV: Tensor, origins: list[list[str]] | str, **fields: Any
    ) -> Self:
        """A proposal made of lists of tokens on the host; `fields` are its other fields.
        `origins` may be the name of the one stage that guessed all tokens."""
        counts = [len(row) for row in tokens]
        if isinstance(origins, str):
            origins = [[origins] * n for n in counts]
        padded = [row + [0] * (max(counts) - len(row)) for row in tokens]
        tokens_BN = torch.tensor(padded, dtype=torch.int64).to(probs_BNV.device, non_blocking=True)
        return cls(counts, tokens_BN, probs_BNV, origins, **fields)

    @classmethod
    def nothing(cls, batch_size: int) -> Self:
        """An empty proposal: a level that verifies it samples one token of each row."""
        return cls.of([[]] * batch_size, torch.empty(batch_size, 0, 0), "")

    @functools.cached_property
    def tokens(self) -> Rows:
        """The guesses of each row as lists; the host waits for the device."""
        return [row[:n] for row, n in zip(self.tokens_BN.tolist(), self.counts, strict=True)]

    def padded(self, numbers_BN: Tensor, N: int, V: int) -> tuple[Tensor, "Guesses"]:
        """Pads random numbers and guesses to N guesses per row, their distributions to V tokens."""
        tokens_BN = self.tokens_BN
        q_BNV = self.probs_BNV
        pad = N - tokens_BN.shape[1]
        if pad or q_BNV.shape[2] < V:  # an empty proposal has no V
            q_BNV = F.pad(q_BNV, (0, V - q_BNV.shape[2], 0, pad))
        if pad:  # a captured pass has more places
            tokens_BN = F.pad(tokens_BN, (0, pad))
            numbers_BN = torch.cat((numbers_BN, numbers_BN[:, -1:].expand(-1, pad)), 1)
        return numbers_BN, Guesses(tokens_BN, q_BNV, torch.tensor(self.counts))

    def emitted(self, verdict_BX: Tensor) -> Rows:
        """A tensor of `Verdict.packed` as lists: each row's accepted guesses and next token.
        A row whose p or q is not finite gets none. The host waits for the device."""
        return [
            [*tokens[:n], last] if is_finite and b not in self.failed else []
            for b, (n, last, is_finite, *tokens) in enumerate(verdict_BX.tolist())
        ]

    def depth(self, b: int) -> int:
        """The largest number of row b's guesses that can be accepted; in a tree, its depth."""
        return self.counts[b]


@dataclass(frozen=True)
class Output:
    """Result of a pass: a model's next-token distributions, and the logits they are made of."""

    probs_BNV: Tensor  # after all filters
    logits_BNV: Tensor  # of the model alone
    filtered_BNV: Tensor  # logits after text filters, see `TextFilters.apply`
    emitted_rows: Rows | None = None  # each row's new tokens, if the pass verified guesses, too

    def emitted(
        self, b: int, tokens: list[int], origins: list[str], places: slice | list[int]
    ) -> "Emitted":
        """The `Emitted` of row b, for tokens from the distributions at `places` of its block."""
        return Emitted(tokens, origins, self.probs_BNV[b, places], self.logits_BNV[b, places])


@dataclass(frozen=True, eq=False)
class Emitted:
    """The tokens that one round of a level emits for one row."""

    tokens: list[int]  # none if the row has failed or is not active
    origins: list[str]  # for each token: the stage that guessed it, or recovered, or bonus
    probs_NV: Tensor  # the verifier's distributions, from which the tokens are samples
    logits_NV: Tensor  # of the verifier, before all filters
    error: Exception | None = None  # why the row cannot go on; it has no tokens then


class Guesses(NamedTuple):
    """The tensors of a proposal; each row is padded after its first `counts_B[b]` tokens."""

    tokens_BN: Tensor
    q_BNV: Tensor  # distributions that the guesses were sampled from
    counts_B: Tensor  # number of guesses of each row

    @property
    def are_real_BN(self) -> Tensor:
        """Boolean (B, N): which places hold a guess, and not padding."""
        places_N = torch.arange(self.tokens_BN.shape[1], device=self.counts_B.device)
        return places_N < self.counts_B.unsqueeze(1)

    def are_finite_B(self, p_BNV: Tensor) -> Tensor:
        """Boolean (B,): whether p and q are finite at all guesses of a row, and p after them."""
        sums_BN = p_BNV.sum(2)
        sums_BN[:, 1:] += self.q_BNV.sum(2)
        return (sums_BN.isfinite() | ~F.pad(self.are_real_BN, (1, 0), value=True)).all(1)

    def token_probs_BN(self, probs_BNV: Tensor) -> Tensor:
        """The probability of each guess (B, N) in the distributions `probs_BNV`."""
        tokens_BN1 = self.tokens_BN.unsqueeze(2)
        return probs_BNV[:, : tokens_BN1.shape[1]].gather(2, tokens_BN1).squeeze(2)

    def num_passed_B(self, passes_BN: Tensor) -> Tensor:
        """Number of guesses of each row before the first that fails its test in `passes_BN`."""
        return (passes_BN & self.are_real_BN).cumprod(1).sum(1)


class Verdict(NamedTuple):
    """The decision about the guesses of each row, on the device."""

    num_accepted_B: Tensor  # accepted guesses of each row
    next_B: Tensor  # the token after the accepted guesses: recovered, or bonus if all were accepted
    finite_B: Tensor  # whether all p and q that count are finite

    def packed(self, guesses: Guesses) -> Tensor:
        """The verdict and the guesses as one tensor (B, 3 + N), for one copy to the host."""
        return torch.cat((torch.stack(self, 1), guesses.tokens_BN), 1)


Rule = Callable[[Tensor, Tensor, Guesses], Verdict]
"""A verification rule: tests guesses by p_1 .. p_{N+1} (B, N + 1, V) and random numbers (B, N + 1)
without a host sync."""


def decide(rule: Rule, proposal: Proposal, p_BNV: Tensor, numbers_BN: Tensor) -> Rows:
    """Applies a rule, with the verifier's p (B, N + 1, V) and random numbers, to a proposal.
    Returns each row's accepted guesses and one more token, or none if p or q is not finite."""
    numbers_BN, guesses = proposal.padded(numbers_BN, p_BNV.shape[1] - 1, p_BNV.shape[2])
    guesses = Guesses(*(it.to(p_BNV.device, non_blocking=True) for it in guesses))
    verdict = rule(p_BNV, numbers_BN.to(p_BNV.device, non_blocking=True), guesses)
    return proposal.emitted(verdict.packed(guesses))


def verify(p_BNV: Tensor, uniforms_BN: Tensor, guesses: Guesses) -> Verdict:
    """Token verification: tests guesses one by one (Leviathan et al. 2023, algorithm 1).
    x_i is accepted while u_i q_i(x_i) < p_i(x_i). The recovered token of the first rejection comes
    from norm(max(p_i - q_i, 0)), or from p_i if that vanishes in floating point; the bonus token
    from p_{n+1}. `uniforms_BN`, in [0, 1), are u_i of each test i, and one for the next token."""
    p_BN = guesses.token_probs_BN(p_BNV)
    q_BN = guesses.token_probs_BN(guesses.q_BNV)
    num_accepted_B = guesses.num_passed_B(uniforms_BN[:, :-1] * q_BN < p_BN)
    return _sample_next(p_BNV, uniforms_BN, guesses, num_accepted_B)


def verify_block(p_BNV: Tensor, uniforms_BN: Tensor, guesses: Guesses) -> Verdict:
    """Block verification: tests a row's guesses jointly; on average accepts no fewer than `verify`.
    Algorithm 2 of Sun et al. 2024 (arXiv 2403.10444) accepts x_1 .. x_i for the largest i with
    u_i < h_i = S_i / (S_i + 1 - w_i), h_n = w_n. w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1) is the
    probability to keep x_1 .. x_i, S_i the mass of max(w_i p_{i+1} - q_{i+1}, 0), from which the
    recovered token comes. They prove it exact. `uniforms_BN` are as in `verify`."""
    q_BNV = guesses.q_BNV
    N = q_BNV.shape[1]
    if not N:  # as for the first token of a text: no row has a guess
        return _sample_next(p_BNV, uniforms_BN, guesses, guesses.counts_B)
    ratios_BN = guesses.token_probs_BN(p_BNV).double() / guesses.token_probs_BN(q_BNV).double()
    logs_BN = ratios_BN.log().cumsum(1)
    w_BN = (logs_BN - logs_BN.cummax(1).values.clamp_min(0)).exp()  # logs: L_i - max(0, L_1 .. L_i)
    scales_BN1 = F.pad(w_BN, (1, 0), value=1.0).to(p_BNV.dtype).unsqueeze(2)  # from w_0 on
    left_BNV = (scales_BN1[:, 1:N] * p_BNV[:, 1:N]).sub_(q_BNV[:, 1:])
    S_BN = F.pad(left_BNV.clamp_min_(0).sum(2, dtype=torch.float64), (0, 1))
    have_next_BN = F.pad(guesses.are_real_BN[:, 1:], (0, 1))
    h_BN = (S_BN / (S_BN + 1 - w_BN)).where(have_next_BN & (w_BN < 1), w_BN)
    passes_BN = (uniforms_BN[:, :-1] < h_BN) & guesses.are_real_BN
    lengths_N = torch.arange(1, N + 1, device=passes_BN.device)
    num_accepted_B = (passes_BN * lengths_N).amax(1)
    scale_B1 = scales_BN1.squeeze(2).gather(1, num_accepted_B.unsqueeze(1))
    return _sample_next(p_BNV, uniforms_BN, guesses, num_accepted_B, scale_B1)


def verify_coupled(p_BNV: Tensor, keys_BN: Tensor, guesses: Guesses) -> Verdict:
    """Coupled verification, by common Gumbel noise: emits argmax(log p_i + g_i) at every position.
    A guess is accepted iff it is that token. `keys_BN` determine the noise g of the positions."""
    choices_BN = gumbel_argmax(p_BNV, keys_BN)
    num_accepted_B = guesses.num_passed_B(choices_BN[:, :-1] == guesses.tokens_BN)
    next_B = choices_BN.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1)
    return Verdict(num_accepted_B, next_B, guesses.are_finite_B(p_BNV))


def _sample_next(
    p_BNV: Tensor,
    uniforms_BN: Tensor,
    guesses: Guesses,
    num_accepted_B: Tensor,
    scale_B1: Tensor | float = 1.0,
) -> Verdict:
    """The verdict, with each row's next token: recovered (max(scale p - q, 0)), or bonus (p)."""
    residual_BV = p_BNV[:, 0]
    if last := guesses.tokens_BN.shape[1]:
        rows = torch.arange(len(p_BNV), device=p_BNV.device)
        p_BV = p_BNV[rows, num_accepted_B]
        q_BV = guesses.q_BNV[rows, num_accepted_B.clamp_max(last - 1)]
        q_BV.masked_fill_((num_accepted_B >= guesses.counts_B).unsqueeze(1), 0.0)
        left_BV = (scale_B1 * p_BV).sub_(q_BV).clamp_min_(0)
        residual_BV = left_BV.where(left_BV.sum(1, keepdim=True) > 0, p_BV)
    next_B = sample(residual_BV, uniforms_BN[:, -1])
    return Verdict(num_accepted_B, next_B, guesses.are_finite_B(p_BNV))
