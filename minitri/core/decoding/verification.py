"""Speculative sampling: the proposal, and the one decision that every level takes about it.

A proposal is tokens together with the distributions q that they were really sampled from. The
decision accepts or corrects them such that every token it emits follows the verifier's distribution
p exactly: `verify` token by token, `verify_block`, the default, all of them together;
`verify_coupled` with common random numbers. Pure functions; randomness is an argument. Guesses stay
on the device until then: the outcome is the only thing that the host waits for.

Legend: B rows, N proposed tokens, V vocab.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.core.decoding.noise import gumbel_argmax
from minitri.core.decoding.sampling import sample

Rows = list[list[int]]
"""Tokens on the host, a list for each row of the batch."""
Active = list[bool]
"""Which rows take part."""


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
        tokens_BN = torch.tensor(padded, dtype=torch.int64)
        tokens_BN = tokens_BN.to(probs_BNV.device, non_blocking=True)
        return cls(counts, tokens_BN, probs_BNV, origins, **more)

    @classmethod
    def nothing(cls, batch_size: int) -> Self:
        """The empty proposal, which a level without a stage below verifies."""
        return cls.of([[]] * batch_size, torch.empty(batch_size, 0, 0), [[]] * batch_size)

    def with_certain(self, rows: Rows, origin: str) -> Self:
        """This one with the tokens of these rows, where there are any, as certain guesses."""
        tokens = [new or row for new, row in zip(rows, self.tokens, strict=True)]
        origins = [[origin] * len(it) or was for it, was in zip(rows, self.origins, strict=True)]
        _, N, V = self.probs_BNV.shape
        more_tokens = max(map(len, tokens)) - N
        more_words = max(0, 1 + max(itertools.chain(*rows)) - V)
        probs_BNV = F.pad(self.probs_BNV, (0, more_words, 0, more_tokens))
        for b, row in enumerate(rows):
            if row:
                ids_N = torch.tensor(row, device=probs_BNV.device)
                probs_BNV[b, : len(row)] = F.one_hot(ids_N, V + more_words)
        return self.of(tokens, probs_BNV, origins)

    @functools.cached_property
    def tokens(self) -> Rows:
        """Row b's tokens on the host, which waits for them."""
        return [row[:n] for row, n in zip(self.tokens_BN.tolist(), self.counts, strict=True)]

    def depth(self, b: int) -> int:
        """The most guesses about row b that can be accepted."""
        return self.counts[b]


class Guesses(NamedTuple):
    """What a proposal says on the device: N tokens of each row, padded after the first n."""

    tokens_BN: Tensor
    probs_BNV: Tensor
    counts_B: Tensor

    @property
    def are_real_BN(self) -> Tensor:
        """Which places are not padding."""
        places_N = torch.arange(self.tokens_BN.shape[1], device=self.counts_B.device)
        return places_N < self.counts_B.unsqueeze(1)


Rule = Callable[[Tensor, Tensor, Guesses], tuple[Tensor, Tensor]]
"""How many guesses of each row are accepted (B,), and the token after them (B,), by the verifier's
p_1 .. p_{N+1} (B, N + 1, V) and random numbers (B, N + 1), without a question to the host."""
Run = Callable[..., Tensor]
"""Calls its first argument with the others, tensors, on a device: `run_now` or `GraphPool.run`."""


def run_now(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What the function gives for these tensors, some of which may be on the host."""
    return function(*(it.to(inputs[0].device, non_blocking=True) for it in inputs))


def decide(
    rule: Rule, proposal: Proposal, probs_BNV: Tensor, numbers_BN: Tensor, run: Run = run_now
) -> Rows:
    """Of each row the accepted guesses, and one token more; nothing if p or q is not finite."""
    tokens_BN, q_BNV, V = proposal.tokens_BN, proposal.probs_BNV, probs_BNV.shape[2]
    pad = probs_BNV.shape[1] - numbers_BN.shape[1]
    if pad or q_BNV.shape[2] < V:  # by a captured pass, or of nothing
        tokens_BN = F.pad(tokens_BN, (0, pad))
        q_BNV = F.pad(q_BNV, (0, V - q_BNV.shape[2], 0, pad))
        numbers_BN = torch.cat((numbers_BN, numbers_BN[:, -1:].expand(-1, pad)), 1)
    guesses = (tokens_BN, q_BNV, torch.tensor(proposal.counts))
    outcome = run(verdict_by(rule), probs_BNV, numbers_BN, *guesses).tolist()
    tokens = Rows()
    for num_accepted, next_token, is_finite, *guessed in outcome:
        tokens.append([*guessed[:num_accepted], next_token] if is_finite else [])
    return tokens


@functools.cache  # one function per rule, so that it is captured once
def verdict_by(rule: Rule) -> Callable[..., Tensor]:
    """`_verdict` of a rule."""
    return functools.partial(_verdict, rule)


def _verdict(rule: Rule, p_BNV: Tensor, numbers_BN: Tensor, *tensors: Tensor) -> Tensor:
    """One tensor (B, 3 + N): guesses accepted, next token, whether all is finite, guesses."""
    guesses = Guesses(*tensors)
    q_are_finite_BN = guesses.probs_BNV.sum(2).isfinite() | ~guesses.are_real_BN
    p_are_finite_BN = p_BNV.sum(2).isfinite() | ~F.pad(guesses.are_real_BN, (1, 0), value=True)
    are_finite_B = p_are_finite_BN.all(1) & q_are_finite_BN.all(1)
    outcome = (*rule(p_BNV, numbers_BN, guesses), are_finite_B.to(guesses.counts_B))
    return torch.cat((torch.stack(outcome, 1), guesses.tokens_BN), 1)


def verify(p_BNV: Tensor, uniforms_BN: Tensor, guesses: Guesses) -> tuple[Tensor, Tensor]:
    """x_i is accepted while u_i q_i(x_i) < p_i(x_i) (Leviathan et al. 2023, algorithm 1).

    The recovered token of the first rejection comes from norm(max(p_i - q_i, 0)), or from p_i if
    that vanishes in floating point; the bonus token, if all n are accepted, from p_{n+1}.
    `uniforms_BN` are independent numbers in [0, 1), one per test, and last the one of that token.
    """
    p_BN = _of_tokens(p_BNV, guesses)
    q_BN = _of_tokens(guesses.probs_BNV, guesses)
    num_accepted_B = _num_passed(uniforms_BN[:, :-1] * q_BN < p_BN, guesses)
    return _sample_next(p_BNV, uniforms_BN, guesses, num_accepted_B)


def verify_block(p_BNV: Tensor, uniforms_BN: Tensor, guesses: Guesses) -> tuple[Tensor, Tensor]:
    """`verify` for all guesses of a row together: no fewer are accepted in expectation.

    Block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2) accepts x_1 .. x_i for the
    largest i with u_i < h_i; they stay with probability w_i = min(w_{i-1} p_i(x_i) / q_i(x_i), 1),
    whatever else does. With S_i the mass of max(w_i p_{i+1} - q_{i+1}, 0), from which the recovered
    token comes, h_i = S_i / (S_i + 1 - w_i); h_n = w_n. So the next token follows p_{i+1}.
    """
    N = guesses.tokens_BN.shape[1]
    if not N:
        return verify(p_BNV, uniforms_BN, guesses)
    q_BNV = guesses.probs_BNV
    p_BN = _of_tokens(p_BNV, guesses)
    q_BN = _of_tokens(q_BNV, guesses)
    logs_BN = (p_BN.double() / q_BN.double()).log().cumsum(1)
    w_BN = (logs_BN - logs_BN.cummax(1).values.clamp_min(0)).exp()  # the running product, capped
    scales_BN1 = F.pad(w_BN, (1, 0), value=1.0).to(p_BNV.dtype).unsqueeze(2)  # from w_0 on
    left_BNV = (scales_BN1[:, 1:N] * p_BNV[:, 1:N]).sub_(q_BNV[:, 1:])
    S_BN = F.pad(left_BNV.clamp_min_(0).sum(2), (0, 1)).double()
    have_next_BN = F.pad(guesses.are_real_BN[:, 1:], (0, 1))
    h_BN = (S_BN / (S_BN + 1 - w_BN)).where(have_next_BN & (w_BN < 1), w_BN)
    passes_BN = (uniforms_BN[:, :-1] < h_BN) & guesses.are_real_BN
    lengths = torch.arange(1, N + 1, device=passes_BN.device)
    num_accepted_B = (passes_BN * lengths).amax(1)
    scale_B1 = scales_BN1.squeeze(2).gather(1, num_accepted_B.unsqueeze(1))
    return _sample_next(p_BNV, uniforms_BN, guesses, num_accepted_B, scale_B1)


def verify_coupled(p_BNV: Tensor, keys_BN: Tensor, guesses: Guesses) -> tuple[Tensor, Tensor]:
    """Emits argmax(log p_i + g_i) at every position; accepts a guess iff it is that very token.
    `keys_BN` name the Gumbel noise g of the positions."""
    choices_BN = gumbel_argmax(p_BNV, keys_BN)
    num_accepted_B = _num_passed(choices_BN[:, :-1] == guesses.tokens_BN, guesses)
    return num_accepted_B, choices_BN.gather(1, num_accepted_B.unsqueeze(1)).squeeze(1)


def _of_tokens(probs_BNV: Tensor, guesses: Guesses) -> Tensor:
    """The probability of each guess (B, N) at its place."""
    tokens_BN1 = guesses.tokens_BN.unsqueeze(2)
    return probs_BNV[:, : tokens_BN1.shape[1]].gather(2, tokens_BN1).squeeze(2)


def _num_passed(passes_BN: Tensor, guesses: Guesses) -> Tensor:
    """Guesses of each row (B,) before the first that fails its test."""
    return (passes_BN & guesses.are_real_BN).cumprod(1).sum(1)


def _sample_next(
    p_BNV: Tensor,
    uniforms_BN: Tensor,
    guesses: Guesses,
    num_accepted_B: Tensor,
    scale_B1: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """A recovered token from max(scale p - q, 0), or a bonus token."""
    rows = torch.arange(len(p_BNV), device=p_BNV.device)
    residual_BV = p_BV = p_BNV[rows, num_accepted_B]
    if last := guesses.tokens_BN.shape[1]:
        q_BV = guesses.probs_BNV[rows, num_accepted_B.clamp_max(last - 1)]
        q_BV = q_BV.where((num_accepted_B < guesses.counts_B).unsqueeze(1), 0.0)
        left_BV = (scale_B1 * p_BV - q_BV).clamp_min(0)
        residual_BV = left_BV.where(left_BV.sum(1, keepdim=True) > 0, p_BV)
    return num_accepted_B, sample(residual_BV, uniforms_BN[:, -1])
