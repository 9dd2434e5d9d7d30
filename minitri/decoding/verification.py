"""Speculative sampling: what a proposal is, and the one decision every level of the cascade takes about it.

A proposal is tokens together with the laws q they were really drawn from, so nobody can pair tokens with a law they do
not come from. `verify` accepts or corrects them such that every token a level emits follows that level's law p exactly
(Leviathan et al. 2023, algorithm 1; TriForce section 3.3); the p rows are then the valid proposal for the next level.
`verify_coupled` decides by common random numbers instead: a guess is kept if the verifier would have said the same.
Both are pure functions; all randomness is an argument.

Legend: B rows, N proposed tokens, V vocab.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minitri.decoding.sampling import sample


class NotFiniteError(ArithmeticError):
    """A law is not made of finite numbers: the weights are damaged, or overflow their dtype."""


@dataclass(frozen=True)
class Proposal:
    """Guesses for every row, with the laws they were drawn from. Row b is valid in its first `counts[b]` tokens."""

    tokens: list[list[int]]
    """Row b's tokens x_1 .. x_n."""
    laws_BNV: Tensor
    """Row q_i of each: the law of x_i given everything before it. What stands behind a row's count is ignored."""
    origins: list[list[str]]
    """Which stage came up with each token: for the statistics and for showing, never for a decision."""

    @property
    def counts(self) -> list[int]:
        """Guesses per row."""
        return [len(row) for row in self.tokens]

    @classmethod
    def nothing(cls, batch_size: int) -> Proposal:
        """No guesses at all: what a stage without a stage below verifies."""
        return cls(
            [[] for _ in range(batch_size)],
            torch.empty(batch_size, 0, 0),
            [[] for _ in range(batch_size)],
        )

    def tokens_BN(self, device: torch.device) -> Tensor:
        """The tokens as one tensor, padded with 0 to the longest row."""
        N = max(self.counts)
        return integers([row + [0] * (N - len(row)) for row in self.tokens], device)


@dataclass(frozen=True)
class Verdict:
    """What became of a proposal: how many of each row's guesses stay, and the token that follows them."""

    num_accepted: list[int]
    next_tokens: list[int]
    """The recovered token where a guess was rejected, the bonus token where all were accepted."""


def verify(proposal: Proposal, laws_BNV: Tensor, uniforms_BN: Tensor) -> Verdict:
    """Accepts x_i while u_i q_i(x_i) < p_i(x_i); corrects the first rejection from norm(max(p_i - q_i, 0)).

    `laws_BNV`, (B, N + 1, V), are the verifier's laws p_1 .. p_{N+1}, `uniforms_BN` (B, N + 1) independent numbers in
    [0, 1): one per test, the last one for the recovered or bonus token. If the residual vanishes in floating point, the
    token comes from p_i. The verdict takes one host synchronisation. Raises `NotFiniteError`.
    """
    B, device = len(proposal.tokens), laws_BNV.device
    rows = torch.arange(B, device=device)
    if not any(proposal.counts):
        return _on_host(
            laws_BNV, torch.zeros_like(rows), sample(laws_BNV[:, 0], uniforms_BN[:, -1])
        )
    tokens_BN = proposal.tokens_BN(device)
    N = tokens_BN.shape[1]
    counts_B = integers(proposal.counts, device)
    p_BN = laws_BNV[:, :N].gather(2, tokens_BN.unsqueeze(2)).squeeze(2)
    q_BN = proposal.laws_BNV[:, :N].gather(2, tokens_BN.unsqueeze(2)).squeeze(2)
    survives = uniforms_BN[:, :N] * q_BN < p_BN
    survives &= torch.arange(N, device=device) < counts_B.unsqueeze(1)
    num_accepted = survives.cumprod(1).sum(1)
    is_rejected = (num_accepted < counts_B).unsqueeze(1)
    q_BV = proposal.laws_BNV[rows, num_accepted.clamp_max(N - 1)].where(is_rejected, 0.0)
    p_BV = laws_BNV[rows, num_accepted]
    residual_BV = (p_BV - q_BV).clamp_min(0)
    residual_BV = residual_BV.where(residual_BV.sum(1, keepdim=True) > 0, p_BV)
    return _on_host(laws_BNV, num_accepted, sample(residual_BV, uniforms_BN[:, -1]))


def verify_coupled(proposal: Proposal, laws_BNV: Tensor, keys: list[list[int]]) -> Verdict:
    """Emits argmax(log p_i + g_i) at every position, and accepts a guess iff it is just that token.

    `keys[b][i]` names the Gumbel noise g of the position of x_i in row b, so every level that draws for that position
    draws with the same noise. Raises `NotFiniteError`.
    """
    B, device = len(proposal.tokens), laws_BNV.device
    N = max(proposal.counts)
    choices_BN = coupled_argmax(laws_BNV[:, : N + 1], integers(keys, device))
    num_accepted = torch.zeros(B, dtype=torch.int64, device=device)
    if N:
        survives = choices_BN[:, :N] == proposal.tokens_BN(device)
        survives &= torch.arange(N, device=device) < integers(proposal.counts, device).unsqueeze(1)
        num_accepted = survives.cumprod(1).sum(1)
    return _on_host(
        laws_BNV, num_accepted, choices_BN.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
    )


def integers(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    """Whole numbers as a tensor, int64; the host does not wait until they are on the device."""
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def _on_host(laws_BNV: Tensor, num_accepted_B: Tensor, next_tokens_B: Tensor) -> Verdict:
    check = laws_BNV.sum().double().expand(len(num_accepted_B))
    packed = torch.stack((num_accepted_B.double(), next_tokens_B.double(), check)).tolist()
    if not math.isfinite(packed[2][0]):
        raise NotFiniteError
    return Verdict([int(n) for n in packed[0]], [int(token) for token in packed[1]])


def coupled_argmax(laws: Tensor, keys: Tensor) -> Tensor:
    """Gumbel-max: argmax over the vocabulary of log law + noise(key, token), for laws (..., V) and int64 keys (...).

    Noise is made only where a law is positive: a filtered law has few such tokens.
    """
    support = laws.nonzero(as_tuple=True)
    uniforms = hashed_uniforms(keys[support[:-1]], support[-1])
    race = torch.full(laws.shape, -math.inf, dtype=torch.float64, device=laws.device)
    race[support] = laws[support].double().log() - (-uniforms.log()).log()
    return race.argmax(-1)


_STEP = (
    -7046029254386353131
)  # 0x9E3779B97F4A7C15, the golden ratio in 64 bits; int64 arithmetic wraps around
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def hashed_uniforms(keys: Tensor, numbers: Tensor) -> Tensor:
    """Numbers in (0, 1), float64, one for each (key, number): SplitMix64's output function on key + number * step."""
    x = keys + (numbers + 1) * _STEP
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    x = x ^ _shift(x, 31)
    return (_shift(x, 12).double() + 0.5) * 2.0**-52


def noise_key(seed: int, position: int) -> int:
    """The key of a position's noise: two rounds of SplitMix64, so that seeds and positions do not run together."""
    return _splitmix(_splitmix(seed) + position)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; `>>` on int64 would drag the sign along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix(x: int) -> int:
    """SplitMix64 of a Python integer, as a signed 64-bit number."""
    mask = (1 << 64) - 1
    x = (x + _STEP) & mask
    x = ((x ^ (x >> 30)) * (_MIX1 & mask)) & mask
    x = ((x ^ (x >> 27)) * (_MIX2 & mask)) & mask
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x
