"""From logits to next-token distributions in captured steps: `decoding.sampling.probs_from_logits`
by numbers on the device, without a sort and without a question to the host.

Top-k and top-p look for a cutoff by bisection. A token's key is the bits of its score's distance
from the best one: float32 without a sign, whose bits as integers rise with it. So what is found is
a score of the row, and equal scores are kept or dropped together. What stands ahead of a key is
summed in integers, which have one sum in whatever order; they cut probabilities at 2^-45 of the
best one's (V = 128,256), which over a whole row is less than what float32 probabilities err by.

`probs_by_bisection` is the oracle, and what is done where `kernels/sampling.py`, one launch, does
not work.

Legend: N rows, V vocab.
"""

import functools
import math

import torch
from torch import Tensor

from minitri.decoding.sampling import greedy_probs
from minitri.gpu.kernels import are_usable
from minitri.settings import SamplingParams

TOLERANCE = 1e-5
"""Largest error of a probability that rounding explains."""


def probs_from_logits_on_device(
    logits_NV: Tensor, filters: SamplingParams, numbers_3: Tensor
) -> Tensor:
    """Distributions (N, V) by numbers in a tensor (`SamplingParams.numbers`), for captured steps.

    Of `filters` only `filters.form` counts. Nothing is asked of the host, so a captured step
    follows other numbers when the tensor is given others. The logits must be float32.
    """
    if not has_kernel(logits_NV.device):
        return probs_by_bisection(logits_NV, filters, numbers_3)
    from minitri.gpu.kernels.sampling import filter_rows

    return filter_rows(logits_NV, filters, numbers_3, unit_of_mass(logits_NV.shape[1]))


@functools.cache
def has_kernel(device: torch.device) -> bool:
    """Whether the kernel works on a device; tried once, before anything is captured."""
    name = f"the kernel for sampling on {device}"
    return device.type == "cuda" and are_usable(name, lambda: largest_error(device), TOLERANCE)


def unit_of_mass(vocab_size: int) -> float:
    """The mass of a row's best token, such that the whole row's is below 2^62."""
    return 2.0 ** (62 - vocab_size.bit_length())


def probs_by_bisection(logits_NV: Tensor, filters: SamplingParams, numbers_3: Tensor) -> Tensor:
    """`probs_from_logits_on_device` in PyTorch's operations."""
    (temperature, top_p, log_min_p), V = numbers_3, logits_NV.shape[1]
    top_k, has_top_p, has_min_p = filters.form
    scores = (logits_NV - logits_NV.amax(-1, keepdim=True)) / temperature  # garbage at T = 0
    keys_NV = scores.abs().view(torch.int32)
    if 0 < top_k < V:
        last_N1 = last_kept(keys_NV, torch.ones_like(keys_NV), top_k)
        scores = scores.masked_fill(keys_NV > last_N1, -math.inf)
    if has_top_p:
        masses_NV = (scores.exp() * unit_of_mass(V)).long()
        goal_N1 = (top_p * masses_NV.sum(-1, keepdim=True).double()).ceil().long().clamp_min(1)
        scores = scores.masked_fill(keys_NV > last_kept(keys_NV, masses_NV, goal_N1), -math.inf)
    if has_min_p:
        scores = torch.where(scores < log_min_p, -math.inf, scores)
    return torch.where(temperature == 0, greedy_probs(logits_NV), scores.softmax(-1))


def last_kept(keys_NV: Tensor, masses_NV: Tensor, goal_N1: Tensor | int) -> Tensor:
    """The largest key per row (N, 1) ahead of which is less mass than the goal, which is above 0.

    Keys between two of the row's have the same mass ahead, so it is one of the row's, or larger
    than all of them.
    """
    last_N1 = torch.zeros_like(keys_NV[:, :1])
    for bit in reversed(range(31)):
        next_N1 = last_N1 + (1 << bit)
        ahead_N1 = masses_NV.masked_fill(keys_NV >= next_N1, 0).sum(-1, keepdim=True)
        last_N1 = torch.where(ahead_N1 < goal_N1, next_N1, last_N1)
    return last_N1


def largest_error(device: torch.device) -> float:
    """Distance of the kernel from the oracle, on rows with many ties, warm and greedy."""
    from minitri.gpu.kernels.sampling import filter_rows

    generator = torch.Generator().manual_seed(0)
    logits_NV = (8 * torch.randn(3, 20_000, generator=generator)).round().to(device) / 4
    filters, errors = SamplingParams(0.8, 5000, top_p=0.9, min_p=0.01), []
    for numbers in (filters.numbers, SamplingParams().numbers):
        numbers_3 = torch.tensor(numbers, dtype=torch.float64).to(device)
        found = filter_rows(logits_NV, filters, numbers_3, unit_of_mass(logits_NV.shape[1]))
        errors.append((found - probs_by_bisection(logits_NV, filters, numbers_3)).abs().max())
    return float(torch.stack(errors).nan_to_num(torch.inf).max())
