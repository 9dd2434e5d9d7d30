"""Speculative sampling: the proposal, and the one decision that every level takes about it.

A proposal is tokens together with the distributions q that they were really sampled from, so that
nobody can pair tokens with a distribution they do not come from. `verify` accepts or corrects them
such that every token it emits follows the verifier's distribution p exactly (Leviathan et al. 2023,
algorithm 1; TriForce section 3.3). So does `verify_block`, the default, which looks at all of them
together and accepts more (Sun et al. 2024, arXiv 2403.10444); `random_source.py` calls the one that
`SpeculationConfig.verification` names. `verify_coupled` uses common random numbers: a
guess is accepted if the verifier would have said the same. Pure functions; randomness is an
argument.

Guesses stay on the device until they are verified: the outcome brings them to the host, and is the
only thing that the host waits for.

Legend: B rows, N proposed tokens, V vocab.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.decoding.noise import gumbel_argmax
from minitri.decoding.sampling import sample


class NotFiniteError(ArithmeticError):
    """A distribution holds NaN or infinity: the weights are damaged, or overflow their dtype."""

    def __init__(self, *, is_drafter: bool = False) -> None:
        """`is_drafter`: it is that of a guess by the lowest stage."""
        super().__init__(is_drafter)
        self.is_drafter = is_drafter


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
        rows: list[list[Any]] = [[]] * batch_size
        return cls.of(rows, torch.empty(batch_size, 0, 0), rows)

    @functools.cached_property
    def tokens(self) -> list[list[int]]:
        """Row b's tokens on the host, which waits for them."""
        return [row[:n] for row, n in zip(self.tokens_BN.tolist(), self.counts, strict=True)]

    def depth(self, b: int) -> int:
        """The most guesses about row b that can be accepted."""
        return self.counts[b]


Run = Callable[..., Tensor]
"""Calls its first argument with the others, which are tensors, on the device of the first of them:
`run_now`, or `GraphPool.run`."""


def run_now(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What the function gives for these tensors, some of which may be on the host."""
    return function(*(it.to(inputs[0].device, non_blocking=True) for it in inputs))


def verify(
    proposal: Proposal, probs_BNV: Tensor, uniforms_BN: Tensor, run: Run = run_now
) -> list[list[int]]:
    """Of each row the accepted guesses, and one token more: recovered, or the bonus token.

    x_i is accepted while u_i q_i(x_i) < p_i(x_i). The recovered token of the first rejection comes
    from norm(max(p_i - q_i, 0)), or from p_i if that vanishes in floating point. The bonus token,
    if all n are accepted, comes from p_{n+1}. `probs_BNV` (B, N + 1, V) are the verifier's
    p_1 .. p_{N+1}; `uniforms_BN` (B, N + 1) are independent numbers in [0, 1), one per test and the
    last one for the token after the guesses. Takes one host synchronisation. Raises
    `NotFiniteError`.
    """
    decide = _test_each if any(proposal.counts) else _sample_first
    return _outcome(decide, proposal, probs_BNV, uniforms_BN, run)


def verify_block(
    proposal: Proposal, probs_BNV: Tensor, uniforms_BN: Tensor, run: Run = run_now
) -> list[list[int]]:
    """`verify` for all guesses of a row together: no fewer are accepted in expectation.

    Block verification (Sun et al. 2024, algorithm 2) accepts x_1 .. x_i for the largest i with
    u_i < h_i. x_1 .. x_i stay with probability w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1), whatever
    else does. With S_i the mass of max(w_i p_{i+1} - q_{i+1}, 0), from which the recovered token
    after them comes, h_i = S_i / (S_i + 1 - w_i); h_n = w_n. As long as a round has not ended the
    next token therefore follows p_{i+1}, so this too is exact at every level.
    """
    decide = _test_together if any(proposal.counts) else _sample_first
    return _outcome(decide, proposal, probs_BNV, uniforms_BN, run)


def verify_coupled(
    proposal: Proposal, probs_BNV: Tensor, keys: list[list[int]], run: Run = run_now
) -> list[list[int]]:
    """Emits argmax(log p_i + g_i) at every position; accepts a guess iff it is that very token.

    `keys[b][i]` names the Gumbel noise g of the position of x_i in row b: every level that samples
    for a position uses the same noise. Raises `NotFiniteError`.
    """
    return _outcome(_compare, proposal, probs_BNV, torch.tensor(keys), run)


def _outcome(
    decide: Callable[..., Tensor],
    proposal: Proposal,
    probs_BNV: Tensor,
    numbers_BN: Tensor,
    run: Run,
) -> list[list[int]]:
    """What one of the functions below decides, brought to the host in one transfer."""
    guesses = (proposal.tokens_BN, proposal.probs_BNV, torch.tensor(proposal.counts))
    rows = run(decide, probs_BNV, numbers_BN, *guesses).tolist()
    tokens = list[list[int]]()
    for num_accepted, next_token, p_is_finite, q_is_finite, *guessed in rows:
        if not (p_is_finite and q_is_finite):
            is_drafter = not q_is_finite and any("draft" in row for row in proposal.origins)
            raise NotFiniteError(is_drafter=is_drafter)
        tokens.append([*guessed[:num_accepted], next_token])
    return tokens


# Each decides about tokens x (B, N) that were sampled from q (B, N, V), n of them in each row, by
# the verifier's p (B, N + 1, V): see `_packed`. On the device, without a question to the host.


def _sample_first(
    p_BNV: Tensor, uniforms_BN: Tensor, tokens_BN: Tensor, q_BNV: Tensor, counts_B: Tensor
) -> Tensor:
    next_tokens_B = sample(p_BNV[:, 0], uniforms_BN[:, -1])
    return _packed(p_BNV, tokens_BN, q_BNV, counts_B, torch.zeros_like(counts_B), next_tokens_B)


def _test_each(
    p_BNV: Tensor, uniforms_BN: Tensor, tokens_BN: Tensor, q_BNV: Tensor, counts_B: Tensor
) -> Tensor:
    p_BN = _of_tokens(p_BNV, tokens_BN)
    q_BN = _of_tokens(q_BNV, tokens_BN)
    num_accepted_B = _num_passed(uniforms_BN[:, :-1] * q_BN < p_BN, counts_B)
    return _sample_next(p_BNV, uniforms_BN, tokens_BN, q_BNV, counts_B, num_accepted_B)


def _test_together(
    p_BNV: Tensor, uniforms_BN: Tensor, tokens_BN: Tensor, q_BNV: Tensor, counts_B: Tensor
) -> Tensor:
    p_BN = _of_tokens(p_BNV, tokens_BN)
    q_BN = _of_tokens(q_BNV, tokens_BN)
    N = p_BN.shape[1]
    logs_BN = (p_BN.double() / q_BN.double()).log().cumsum(1)
    w_BN = (logs_BN - logs_BN.cummax(1).values.clamp_min(0)).exp()  # the running product, capped
    scales_BN1 = F.pad(w_BN, (1, 0), value=1.0).to(p_BNV.dtype).unsqueeze(2)  # from w_0 on
    left_BNV = (scales_BN1[:, 1:N] * p_BNV[:, 1:N]).sub_(q_BNV[:, 1:N])
    S_BN = F.pad(left_BNV.clamp_min_(0).sum(2), (0, 1)).double()
    lengths = torch.arange(1, N + 1, device=p_BNV.device)
    num_after_BN = counts_B.unsqueeze(1) - lengths
    h_BN = (S_BN / (S_BN + 1 - w_BN)).where((num_after_BN > 0) & (w_BN < 1), w_BN)
    passes_BN = (uniforms_BN[:, :-1] < h_BN) & (num_after_BN >= 0)
    num_accepted_B = (passes_BN * lengths).amax(1)
    scale_B1 = scales_BN1.squeeze(2).gather(1, num_accepted_B.unsqueeze(1))
    return _sample_next(p_BNV, uniforms_BN, tokens_BN, q_BNV, counts_B, num_accepted_B, scale_B1)


def _compare(
    p_BNV: Tensor, keys_BN: Tensor, tokens_BN: Tensor, q_BNV: Tensor, counts_B: Tensor
) -> Tensor:
    N = tokens_BN.shape[1]
    choices_BN = gumbel_argmax(p_BNV[:, : N + 1], keys_BN)
    num_accepted_B = _num_passed(choices_BN[:, :N] == tokens_BN, counts_B)
    next_tokens_B = choices_BN.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1)
    return _packed(p_BNV, tokens_BN, q_BNV, counts_B, num_accepted_B, next_tokens_B)


def _sample_next(
    p_BNV: Tensor,
    uniforms_BN: Tensor,
    tokens_BN: Tensor,
    q_BNV: Tensor,
    counts_B: Tensor,
    num_accepted_B: Tensor,
    scale_B1: Tensor | float = 1.0,
) -> Tensor:
    """The accepted guesses, and a recovered token from max(scale p - q, 0) or a bonus token."""
    rows = torch.arange(len(p_BNV), device=p_BNV.device)
    last = tokens_BN.shape[1] - 1
    q_BV = q_BNV[rows, num_accepted_B.clamp_max(last)]
    q_BV = q_BV.where((num_accepted_B < counts_B).unsqueeze(1), 0.0)
    p_BV = p_BNV[rows, num_accepted_B]
    residual_BV = (scale_B1 * p_BV - q_BV).clamp_min(0)
    residual_BV = residual_BV.where(residual_BV.sum(1, keepdim=True) > 0, p_BV)
    next_tokens_B = sample(residual_BV, uniforms_BN[:, -1])
    return _packed(p_BNV, tokens_BN, q_BNV, counts_B, num_accepted_B, next_tokens_B)


def _of_tokens(probs_BNV: Tensor, tokens_BN: Tensor) -> Tensor:
    """The probability of each token (B, N) at its place."""
    return probs_BNV[:, : tokens_BN.shape[1]].gather(2, tokens_BN.unsqueeze(2)).squeeze(2)


def _num_passed(passes_BN: Tensor, counts_B: Tensor) -> Tensor:
    """Guesses of each row (B,) before the first that fails its test."""
    return (passes_BN & _are_guesses(passes_BN, counts_B)).cumprod(1).sum(1)


def _are_guesses(places_BN: Tensor, counts_B: Tensor) -> Tensor:
    """Which of a proposal's places are not padding."""
    return torch.arange(places_BN.shape[1], device=counts_B.device) < counts_B.unsqueeze(1)


def _packed(
    p_BNV: Tensor,
    tokens_BN: Tensor,
    q_BNV: Tensor,
    counts_B: Tensor,
    num_accepted_B: Tensor,
    next_tokens_B: Tensor,
) -> Tensor:
    """One row of integers (B, 4 + N): how many guesses are accepted, the token after them, whether
    p and q are finite, and the guesses."""
    q_BN = q_BNV.sum(2)
    q_is_finite = (q_BN.isfinite() | ~_are_guesses(q_BN, counts_B)).all()
    are_finite = (p_BNV.sum().isfinite(), q_is_finite)
    flags = [it.to(next_tokens_B).expand_as(next_tokens_B) for it in are_finite]
    return torch.cat((torch.stack((num_accepted_B, next_tokens_B, *flags), 1), tokens_BN), 1)


def integers(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    """Whole numbers as an int64 tensor; the host does not wait until they are on the device."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
