"""Explains a difference between two runs that should write the same text: rounding, or a bug.

Where the texts part, the logits are computed once more in float32 and in the dtype in use. Rounding
explains a difference if in float32 both tokens score within `bound` of the best one. `bound` is
twice the largest difference, over the vocabulary, between the logits of both dtypes (one for each
of the two runs), divided by the temperature where tokens are sampled.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.decoding.noise import hashed_uniforms, noise_key
from minitri.model.block import read_block
from minitri.model.llama import Llama
from minitri.runner import prefill
from minitri.settings import SamplingParams

READ_AT_ONCE = 1024
"""Tokens of a sequence per forward pass when its logits are computed once more."""


@dataclass(frozen=True)
class Mode:
    """How tokens are sampled in one round of comparisons."""

    name: str
    sampling: SamplingParams
    coupled: bool

    def scores(self, logits_V: Tensor, seed: int, position: int) -> Tensor:
        """What the token at a position is the argmax of, in float64, up to a constant.

        That is the logits, or the logarithm of the distribution plus Gumbel noise.
        """
        if not self.sampling.temperature:
            return logits_V.double()
        tokens = torch.arange(len(logits_V), device=logits_V.device)
        uniforms = hashed_uniforms(torch.full_like(tokens, noise_key(seed, position)), tokens)
        return logits_V.double() / self.sampling.temperature - (-uniforms.log()).log()


def modes(temperature: float) -> list[Mode]:
    """The two ways of sampling that give every method the same text."""
    return [
        Mode("greedy", SamplingParams(), coupled=False),
        Mode("coupled", SamplingParams(temperature), coupled=True),
    ]


@dataclass(frozen=True)
class Departure:
    """The first token that differs, in numbers."""

    position: int
    """Of the token in the sequence, prompt included."""
    expected: int
    """The token of autoregressive decoding."""
    got: int
    top2_gap: float
    """Between the two best logits, in the dtype in use."""
    score_gap: float
    """How far the worse one of the two tokens scores below the best token of all, in float32."""
    bound: float
    """What rounding explains of that."""

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains the departure."""
        return self.score_gap <= self.bound


def explain(
    model: Llama,
    exact: Llama,
    sequence: list[int],
    mode: Mode,
    *,
    expected: int,
    got: int,
    seed: int,
    block: int,
) -> Departure:
    """Compares the logits after `sequence` in the dtype of `model` and, by `exact`, in float32.

    The dtype's error is measured on logits read as decoding reads them, alone and at the end of a
    block of `block` tokens. It is at least the spacing of the dtype's numbers at the largest logit.
    """
    exact_V = last_logits(exact, sequence, min(READ_AT_ONCE, len(sequence)))
    widths = (1, min(block, len(sequence)))
    used_NV = torch.stack([last_logits(model, sequence, width) for width in widths])
    spacing = torch.finfo(model.dtype).eps * float(exact_V.abs().max())
    error = max(float((used_NV - exact_V).abs().max()), spacing)
    best_two = used_NV[0].topk(2).values
    scores_V = mode.scores(exact_V, seed, len(sequence))
    top2_gap = float(best_two[0] - best_two[1])
    score_gap = float(scores_V.max() - scores_V[[expected, got]].min())
    bound = 2 * error / (mode.sampling.temperature or 1.0)
    return Departure(len(sequence), expected, got, top2_gap, score_gap, bound)


@torch.inference_mode()
def last_logits(model: Llama, sequence: list[int], width: int) -> Tensor:
    """Logits (V,) after a sequence, of which the last `width` tokens are read at once."""
    start = len(sequence) - width
    config = model.config
    cache = FullCache.allocate(config, 1, len(sequence), dtype=model.dtype, device=model.device)
    for _ in prefill(model, sequence[: start + 1], cache, 0, chunk=READ_AT_ONCE):
        pass
    return model.logits(read_block(model, [sequence[start:]], cache)[0, -1])
