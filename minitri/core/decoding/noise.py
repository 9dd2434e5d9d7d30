"""Gumbel noise keyed by (seed, position, token), so that a seed gives one text for all methods.

The noise of a position is a vector over the vocabulary, computed from a 64-bit key by SplitMix64
(Steele et al. 2014), only for tokens with a probability above 0. Pure functions.
"""

import math

import torch
from torch import Tensor

# SplitMix64's constants 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed
# numbers: int64 tensors wrap around as unsigned arithmetic does.
_STEP = -7046029254386353131
_MIX1 = -4658895280553007687
_MIX2 = -7723592293110705685


def gumbel_argmax(probs: Tensor, keys: Tensor) -> Tensor:
    """Samples tokens from p, (..., V), by int64 keys (...): argmax(log p + Gumbel noise)."""
    return gumbel_scores(probs, keys).argmax(-1)


def gumbel_scores(probs: Tensor, keys: Tensor) -> Tensor:
    """log p + g with Gumbel noise g of all tokens, (..., V) float64; -inf where p is 0."""
    if probs.is_cuda:  # where `nonzero` would make the host wait
        return dense_scores(probs, keys)
    support = probs.nonzero(as_tuple=True)  # a filtered distribution has few such tokens
    scores = torch.full_like(probs, -math.inf, dtype=torch.float64)
    scores[support] = probs[support].double().log() + gumbel(keys[support[:-1]], support[-1])
    return scores


def dense_scores(probs: Tensor, keys: Tensor) -> Tensor:
    """Like `gumbel_scores`, by noise of the whole vocabulary, without a host sync."""
    numbers = torch.arange(probs.shape[-1], device=probs.device)
    return probs.double().log() + gumbel(keys.unsqueeze(-1), numbers)


def gumbel(keys: Tensor, numbers: Tensor) -> Tensor:
    """Gumbel noise for each pair of a noise key and a number, such as a token id; float64."""
    return -(-hashed_uniforms(keys, numbers).log()).log()


def hashed_uniforms(keys: Tensor, numbers: Tensor) -> Tensor:
    """One float64 in (0, 1) for each (key, number): the output of SplitMix64, 52 bits of it."""
    return (_shift_right(splitmix(keys + numbers * _STEP), 12).double() + 0.5) * 2.0**-52


def noise_keys(seed: int, positions: Tensor) -> Tensor:
    """Noise keys of a seed at positions; hash(seed + position) would share keys between seeds."""
    return splitmix(splitmix(torch.tensor(seed)) + positions)


def splitmix(states: Tensor) -> Tensor:
    """The output of the generator SplitMix64 after each of these states, int64."""
    x = states + _STEP
    x = (x ^ _shift_right(x, 30)) * _MIX1
    x = (x ^ _shift_right(x, 27)) * _MIX2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, whose `>>` would copy the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
