"""Speculative sampling: the proposal, and the one decision that every level takes about it.

A proposal is tokens together with the distributions q that they were really sampled from. The
decision accepts or corrects them such that every token it emits follows the verifier's distribution
p exactly: `verify` token by token, `verify_block`, the default, all of them together;
`verify_coupled` with common random numbers. Pure functions; randomness is an argument. Guesses stay
on the device until then: the outcome is the only thing that the host waits for.

Legend: B rows, N proposed tokens, V vocab.
"""

import functools
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.decoding.noise import gumbel_argmax
from minitri.decoding.sampling import sample

Rows = list[list[int]]
"""Tokens on the host, a list for each row of the batch."""
Active = list[bool]
"""Which rows take part."""


@dataclass(eq=False)
class NotFiniteError(ArithmeticError):
    """A distribution is not finite: the weights are damaged, or overflow their dtype."""

    is_drafter: bool = False
    """It is that of a guess by the lowest stage."""


@dataclass(frozen=True)
class Proposal:
    """Guesses for every row, with the distributions that they were sampled from."""

    counts: list[int]
    """Guesses n of each row."""
    tokens_BN: Tensor
    """Row b's tokens x_1 .. x_n; padded after n, N being the largest."""
    probs_BNV: Tensor
    """Row i is q_i, the distribution of x_i given everything before it; padded after n."""
    origins: list[list[str]]
    """The stage that guessed each token, for display."""

    @classmethod
    def of(cls, tokens: Rows, probs_BNV: Tensor, origins: list[list[str]], **more: Any) -> Self:
        """A proposal of tokens that the host knows."""
        counts = [len(row) for row in tokens]
        padded = [row + [0] * (max(counts) - len(row)) for row in tokens]
        return cls(counts, integers(padded, probs_BNV.device), probs_BNV, origins, **more)

    @classmethod
    def nothing(cls, batch_size: int) -> Self:
        """The empty proposal, which a level without a stage below verifies."""
        rows: list[list[Any]] = [[]] * batch_size
        return cls.of(rows, torch.empty(batch_size, 0, 0), rows)

    @functools.cached_property
    def tokens(self) -> Rows:
        """Row b's tokens on the host, which waits for them."""
        return [row[:n] for row, n in zip(self.tokens_BN.tolist(), self.counts, strict=True)]

    @functools.cached_property
    def are_guesses_BN(self) -> Tensor:
        """Which places are not padding."""
        counts_B1 = integers(self.counts, self.tokens_BN.device).unsqueeze(1)
        return torch.arange(self.tokens_BN.shape[1], device=self.tokens_BN.device) < counts_B1

    def depth(self, b: int) -> int:
        """The most guesses about row b that can be accepted."""
        return self.counts[b]


def verify(proposal: Proposal, probs_BNV: Tensor, uniforms_BN: Tensor) -> Rows:
    """Of each row the accepted guesses, and one token more: recovered, or the bonus token.

    x_i is accepted while u_i q_i(x_i) < p_i(x_i). The recovered token of the first rejection comes
    from norm(max(p_i - q_i, 0)), or from p_i if that vanishes in floating point; the bonus token,
    if all n are accepted, from p_{n+1} (Leviathan et al. 2023, algorithm 1). `probs_BNV`
    (B, N + 1, V) are the verifier's p_1 .. p_{N+1}; `uniforms_BN` (B, N + 1) are independent
    numbers in [0, 1), one per test, and last the one of that token. Raises `NotFiniteError`.
    """
    if not any(proposal.counts):
        next_tokens_B = sample(probs_BNV[:, 0], uniforms_BN[:, -1])
        return _on_host(proposal, probs_BNV, torch.zeros_like(next_tokens_B), next_tokens_B)
    p_BN, q_BN = _of_guesses(proposal, probs_BNV)
    num_accepted_B = _num_passed(uniforms_BN[:, :-1] * q_BN < p_BN, proposal)
    return _sample_next(proposal, probs_BNV, num_accepted_B, uniforms_BN)


def verify_block(proposal: Proposal, probs_BNV: Tensor, uniforms_BN: Tensor) -> Rows:
    """`verify` for all guesses of a row together: no fewer are accepted in expectation.

    Block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2) accepts x_1 .. x_i for the
    largest i with u_i < h_i; they stay with probability w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1),
    whatever else does. With S_i the mass of max(w_i p_{i+1} - q_{i+1}, 0), from which the recovered
    token comes, h_i = S_i / (S_i + 1 - w_i); h_n = w_n. So the next token follows p_{i+1}.
    """
    if not any(proposal.counts):
        return verify(proposal, probs_BNV, uniforms_BN)
    p_BN, q_BN = _of_guesses(proposal, probs_BNV)
    N = p_BN.shape[1]
    logs_BN = (p_BN.double() / q_BN.double()).log().cumsum(1)
    w_BN = (logs_BN - logs_BN.cummax(1).values.clamp_min(0)).exp()  # the running product, capped
    scales_BN1 = F.pad(w_BN, (1, 0), value=1.0).to(probs_BNV.dtype).unsqueeze(2)  # from w_0 on
    left_BNV = (scales_BN1[:, 1:N] * probs_BNV[:, 1:N]).sub_(proposal.probs_BNV[:, 1:N])
    S_BN = F.pad(left_BNV.clamp_min_(0).sum(2), (0, 1)).double()
    have_next_BN = F.pad(proposal.are_guesses_BN[:, 1:], (0, 1))
    h_BN = (S_BN / (S_BN + 1 - w_BN)).where(have_next_BN & (w_BN < 1), w_BN)
    passes_BN = (uniforms_BN[:, :-1] < h_BN) & proposal.are_guesses_BN
    lengths = torch.arange(1, N + 1, device=passes_BN.device)
    num_accepted_B = (passes_BN * lengths).amax(1)
    scale_B1 = scales_BN1.squeeze(2).gather(1, num_accepted_B.unsqueeze(1))
    return _sample_next(proposal, probs_BNV, num_accepted_B, uniforms_BN, scale_B1)


def verify_coupled(proposal: Proposal, probs_BNV: Tensor, keys: list[list[int]]) -> Rows:
    """Emits argmax(log p_i + g_i) at every position; accepts a guess iff it is that very token.
    `keys[b][i]` names the Gumbel noise g of the position of x_i. Raises `NotFiniteError`."""
    choices_BN = gumbel_argmax(probs_BNV, integers(keys, probs_BNV.device))
    # Without guesses, their tokens may be on another device.
    passes_BN = choices_BN[:, :-1] == proposal.tokens_BN.to(choices_BN)
    num_accepted_B = _num_passed(passes_BN, proposal)
    next_tokens_B = choices_BN.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1)
    return _on_host(proposal, probs_BNV, num_accepted_B, next_tokens_B)


def _of_guesses(proposal: Proposal, probs_BNV: Tensor) -> tuple[Tensor, Tensor]:
    """The verifier's and the proposer's probability of each guess, (B, N) both."""
    tokens_BN1 = proposal.tokens_BN.unsqueeze(2)
    p_BN1, q_BN1 = (probs.gather(2, tokens_BN1) for probs in (probs_BNV, proposal.probs_BNV))
    return p_BN1.squeeze(2), q_BN1.squeeze(2)


def _sample_next(
    proposal: Proposal,
    probs_BNV: Tensor,
    num_accepted_B: Tensor,
    uniforms_BN: Tensor,
    scale_B1: Tensor | float = 1.0,
) -> Rows:
    """The accepted guesses, and a recovered token from max(scale p - q, 0) or a bonus token."""
    rows = torch.arange(len(probs_BNV), device=probs_BNV.device)
    is_rejected_B = num_accepted_B < proposal.are_guesses_BN.sum(1)
    last = max(proposal.counts) - 1
    q_BV = proposal.probs_BNV[rows, num_accepted_B.clamp_max(last)]
    q_BV = q_BV.where(is_rejected_B.unsqueeze(1), 0.0)
    p_BV = probs_BNV[rows, num_accepted_B]
    residual_BV = (scale_B1 * p_BV - q_BV).clamp_min(0)
    residual_BV = residual_BV.where(residual_BV.sum(1, keepdim=True) > 0, p_BV)
    next_tokens_B = sample(residual_BV, uniforms_BN[:, -1])
    return _on_host(proposal, probs_BNV, num_accepted_B, next_tokens_B)


def _num_passed(passes_BN: Tensor, proposal: Proposal) -> Tensor:
    """Guesses of each row (B,) before the first that fails its test."""
    return (passes_BN & proposal.are_guesses_BN.to(passes_BN.device)).cumprod(1).sum(1)


def integers(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    """Whole numbers as an int64 tensor; the host does not wait until they are on the device."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def _on_host(
    proposal: Proposal, probs_BNV: Tensor, num_accepted_B: Tensor, next_tokens_B: Tensor
) -> Rows:
    """The outcome, brought to the host in one transfer."""
    q_are_finite_BN = proposal.probs_BNV.sum(2).isfinite() | ~proposal.are_guesses_BN
    p_is_finite_B = probs_BNV.sum((1, 2)).isfinite()
    flags = (it.to(next_tokens_B) for it in (p_is_finite_B, q_are_finite_BN.all(1)))
    columns = torch.stack((num_accepted_B, next_tokens_B, *flags), 1)
    rows = torch.cat((columns, proposal.tokens_BN.to(columns)), 1).tolist()
    tokens = Rows()
    for num_accepted, next_token, p_is_finite, q_is_finite, *guesses in rows:
        if not (p_is_finite and q_is_finite):
            by_drafter = any("draft" in row for row in proposal.origins)
            raise NotFiniteError(is_drafter=by_drafter and not q_is_finite)
        tokens.append([*guesses[:num_accepted], next_token])
    return tokens
