"""Speculative sampling: the proposal, and the one decision that every level takes about it.

A proposal is tokens together with the distributions q that they were really sampled from, so that
nobody can pair tokens with a distribution they do not come from. `verify` accepts or corrects them
such that every token it emits follows the verifier's distribution p exactly (Leviathan et al. 2023,
algorithm 1; TriForce section 3.3). So does `verify_block`, which looks at all of them together and
keeps more (Sun et al. 2024, arXiv 2403.10444). `verify_coupled` uses common random numbers instead:
a guess is kept if the verifier would have said the same. Pure functions; randomness is an argument.

Guesses stay on the device until they are verified: the verdict brings them to the host, and is the
only thing that the host waits for.

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


class NotFiniteError(ArithmeticError):
    """A distribution holds NaN or infinity: the weights are damaged, or overflow their dtype."""


@dataclass(frozen=True)
class Proposal:
    """Guesses for every row, with the distributions that they were sampled from."""

    counts: list[int]
    """Guesses n of each row."""
    tokens_BN: Tensor
    """Row b's tokens x_1 .. x_n; padded after n, N being the largest."""
    probs_BNV: Tensor
    """Row i is q_i, the distribution of x_i given everything before it; padded after n. Guesses
    from the first q_i on that is not finite do not count."""
    origins: list[list[str]]
    """The stage that guessed each token: for statistics and display, never for a decision."""

    @classmethod
    def of(
        cls, tokens: list[list[int]], probs_BNV: Tensor, origins: list[list[str]], **more: Any
    ) -> Self:
        """A proposal of tokens that the host knows."""
        counts = [len(row) for row in tokens]
        padded = [row + [0] * (max(counts) - len(row)) for row in tokens]
        return cls(counts, integers(padded, probs_BNV.device), probs_BNV, origins, **more)

    @classmethod
    def nothing(cls, batch_size: int) -> Self:
        """The empty proposal, which a level without a stage below verifies."""
        rows: list[list[Any]] = [[] for _ in range(batch_size)]
        return cls.of(rows, torch.empty(batch_size, 0, 0), rows)

    @functools.cached_property
    def tokens(self) -> list[list[int]]:
        """Row b's tokens on the host, which waits for them."""
        return [row[:n] for row, n in zip(self.tokens_BN.tolist(), self.counts, strict=True)]


@dataclass(frozen=True)
class Verdict:
    """What became of a proposal, row by row."""

    num_accepted: list[int]
    """How many guesses stay, from the first on."""
    next_tokens: list[int]
    """The token after them: recovered where a guess was rejected, else the bonus token."""
    guesses: list[list[int]]
    """The tokens that were proposed, padded."""
    is_damaged: bool = False
    """Whether they came with distributions that are not finite."""


def verify(proposal: Proposal, probs_BNV: Tensor, uniforms_BN: Tensor) -> Verdict:
    """Accepts x_i while u_i q_i(x_i) < p_i(x_i), then samples one more token.

    The recovered token of the first rejection comes from norm(max(p_i - q_i, 0)), or from p_i if
    that vanishes in floating point. The bonus token, if all n survive, comes from p_{n+1}.
    `probs_BNV` (B, N + 1, V) are the verifier's p_1 .. p_{N+1}; `uniforms_BN` (B, N + 1) are
    independent numbers in [0, 1), one per test and the last one for the recovered or bonus token.
    Takes one host synchronisation. Raises `NotFiniteError`.
    """
    if not any(proposal.counts):
        return _without_guesses(probs_BNV, uniforms_BN)
    p_BN, q_BN = _probs_of_guesses(proposal, probs_BNV)
    N, counts_B = p_BN.shape[1], _usable_counts(proposal)
    num_accepted = _num_surviving(uniforms_BN[:, :N] * q_BN < p_BN, counts_B)
    return _sample_next(proposal, probs_BNV, counts_B, num_accepted, uniforms_BN)


def verify_block(proposal: Proposal, probs_BNV: Tensor, uniforms_BN: Tensor) -> Verdict:
    """Accepts x_1 .. x_i for the largest i with u_i < h_i, then samples one more token.

    Block verification (Sun et al. 2024, algorithm 2): no fewer tokens in expectation than `verify`,
    whose arguments these are, and the same distribution. x_1 .. x_i stay with probability
    w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1), whatever else does. With S_i the mass of
    max(w_i p_{i+1} - q_{i+1}, 0), from which the recovered token after them comes,
    h_i = S_i / (S_i + 1 - w_i); h_n = w_n. As long as a round has not ended the next token
    therefore follows p_{i+1}, so this too is exact at every level.
    """
    if not any(proposal.counts):
        return _without_guesses(probs_BNV, uniforms_BN)
    p_BN, q_BN = _probs_of_guesses(proposal, probs_BNV)
    N, device, counts_B = p_BN.shape[1], p_BN.device, _usable_counts(proposal)
    logs_BN = (p_BN.double() / q_BN.double()).log().cumsum(1)
    w_BN = (logs_BN - logs_BN.cummax(1).values.clamp_min(0)).exp()  # the running product, capped
    scales_BN1 = F.pad(w_BN, (1, 0), value=1.0).to(probs_BNV.dtype).unsqueeze(2)  # from w_0 on
    left_BNV = (scales_BN1[:, 1:N] * probs_BNV[:, 1:N]).sub_(proposal.probs_BNV[:, 1:N])
    S_BN = F.pad(left_BNV.clamp_min_(0).sum(2), (0, 1)).double()
    lengths = torch.arange(1, N + 1, device=device)
    num_after_BN = counts_B.unsqueeze(1) - lengths
    h_BN = (S_BN / (S_BN + 1 - w_BN)).where((num_after_BN > 0) & (w_BN < 1), w_BN)
    passes_BN = (uniforms_BN[:, :N] < h_BN) & (num_after_BN >= 0)
    num_accepted = (passes_BN * lengths).amax(1)
    scale_B1 = scales_BN1.squeeze(2).gather(1, num_accepted.unsqueeze(1))
    return _sample_next(proposal, probs_BNV, counts_B, num_accepted, uniforms_BN, scale_B1)


def verify_coupled(proposal: Proposal, probs_BNV: Tensor, keys: list[list[int]]) -> Verdict:
    """Emits argmax(log p_i + g_i) at every position; accepts a guess iff it is that very token.

    `keys[b][i]` names the Gumbel noise g of the position of x_i in row b: every level that samples
    for a position uses the same noise. Raises `NotFiniteError`.
    """
    B, N, device = len(keys), max(proposal.counts), probs_BNV.device
    choices_BN = gumbel_argmax(probs_BNV[:, : N + 1], integers(keys, device))
    counts_B = num_accepted = torch.zeros(B, dtype=torch.int64, device=device)
    if N:
        counts_B = _usable_counts(proposal)
        num_accepted = _num_surviving(choices_BN[:, :N] == proposal.tokens_BN, counts_B)
    next_tokens = choices_BN.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    return _on_host(proposal, probs_BNV, counts_B, num_accepted, next_tokens)


def _probs_of_guesses(proposal: Proposal, probs_BNV: Tensor) -> tuple[Tensor, Tensor]:
    """p_i(x_i) and q_i(x_i) of all guesses, (B, N) both."""
    tokens_BN1 = proposal.tokens_BN.unsqueeze(2)
    N = tokens_BN1.shape[1]
    p_BN1, q_BN1 = (it[:, :N].gather(2, tokens_BN1) for it in (probs_BNV, proposal.probs_BNV))
    return p_BN1.squeeze(2), q_BN1.squeeze(2)


def _usable_counts(proposal: Proposal) -> Tensor:
    """Guesses of each row (B,) before the first whose distribution is not finite."""
    are_finite_BN = proposal.probs_BNV.sum(2).isfinite()
    return are_finite_BN.cumprod(1).sum(1).minimum(integers(proposal.counts, are_finite_BN.device))


def _without_guesses(probs_BNV: Tensor, uniforms_BN: Tensor) -> Verdict:
    next_tokens = sample(probs_BNV[:, 0], uniforms_BN[:, -1])
    zeros = torch.zeros_like(next_tokens)
    return _on_host(Proposal.nothing(len(zeros)), probs_BNV, zeros, zeros, next_tokens)


def _sample_next(
    proposal: Proposal, probs_BNV: Tensor, counts_B: Tensor, num_accepted: Tensor,
    uniforms_BN: Tensor, scale_B1: Tensor | float = 1.0,
) -> Verdict:  # fmt: skip
    """The verdict, with a recovered token from max(scale p - q, 0) or a bonus token."""
    N, rows = max(proposal.counts), torch.arange(len(probs_BNV), device=probs_BNV.device)
    is_rejected = (num_accepted < counts_B).unsqueeze(1)
    q_BV = proposal.probs_BNV[rows, num_accepted.clamp_max(N - 1)].where(is_rejected, 0.0)
    p_BV = probs_BNV[rows, num_accepted]
    residual_BV = (scale_B1 * p_BV - q_BV).clamp_min(0)
    residual_BV = residual_BV.where(residual_BV.sum(1, keepdim=True) > 0, p_BV)
    next_tokens = sample(residual_BV, uniforms_BN[:, -1])
    return _on_host(proposal, probs_BNV, counts_B, num_accepted, next_tokens)


def _num_surviving(passes_BN: Tensor, counts_B: Tensor) -> Tensor:
    """Guesses of each row (B,) before the first that fails its test."""
    N, device = passes_BN.shape[1], passes_BN.device
    is_guess_BN = torch.arange(N, device=device) < counts_B.unsqueeze(1)
    return (passes_BN & is_guess_BN).cumprod(1).sum(1)


def integers(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    """Whole numbers as an int64 tensor; the host does not wait until they are on the device."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def _on_host(
    proposal: Proposal,
    probs_BNV: Tensor,
    counts_B: Tensor,
    num_accepted_B: Tensor,
    next_tokens_B: Tensor,
) -> Verdict:
    """The verdict, brought to the host in one transfer: rows of whole numbers, the guesses last."""
    is_finite_B = probs_BNV.sum().isfinite().to(torch.int64).expand_as(counts_B)
    columns = torch.stack((num_accepted_B, next_tokens_B, counts_B, is_finite_B), 1)
    rows = torch.cat((columns, proposal.tokens_BN.to(columns)), 1).tolist()
    accepted, following, guessed, is_damaged = list[int](), list[int](), list[list[int]](), False
    for (num_accepted, next_token, num_usable, is_finite, *guesses), num_guesses in zip(
        rows, proposal.counts, strict=True
    ):
        if not is_finite:
            raise NotFiniteError
        is_damaged |= num_usable < num_guesses
        accepted.append(num_accepted)
        following.append(next_token)
        guessed.append(guesses)
    return Verdict(accepted, following, guessed, is_damaged)
