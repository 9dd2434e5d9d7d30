"""Explains a difference between two runs that should write the same text: rounding, or a bug.

Rounding explains it if both tokens score within `bound` of the best one where the texts part: twice
the largest difference between logits computed alone and at the end of a block, but at least the
spacing of the dtype's numbers, divided by the temperature where tokens are sampled.

Legend: N tokens, V vocab.
"""

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.decoding.noise import gumbel, noise_keys
from minitri.model.block import read_block
from minitri.model.llama import Llama
from minitri.runner import prefill


def explain(
    model: Llama, sequence: list[int], tokens: list[int], block: int, temperature: float, seed: int
) -> dict[str, float]:
    """Compares the scores after `sequence` of two `tokens`, the expected one and the one that came.

    `score_gap` is how far the worse of them scores below the best of all; `bound`, what rounding
    explains of that. Blocks have `block` tokens.
    """
    widths = (1, min(block, len(sequence)))
    logits_2V = torch.stack([last_logits(model, sequence, width)[-1] for width in widths])
    alone_V = logits_2V[0]
    spacing = torch.finfo(model.dtype).eps * alone_V.abs().max()
    error = logits_2V.diff(dim=0).abs().max().maximum(spacing)
    scores_V = scores(alone_V, temperature, seed, len(sequence))
    return {
        "position": len(sequence),
        "expected": tokens[0],
        "got": tokens[1],
        "top2_gap": float(alone_V.topk(2).values.diff().abs()),
        "score_gap": float(scores_V.max() - scores_V[tokens].min()),
        "bound": 2 * float(error) / (temperature or 1.0),
    }


def scores(logits_V: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """What the token at a position is the argmax of, in float64 and up to a constant: the logits,
    or the logarithm of the distribution plus Gumbel noise."""
    if not temperature:
        return logits_V.double()
    tokens = torch.arange(len(logits_V), device=logits_V.device)
    key = noise_keys(seed, torch.tensor(position)).to(tokens.device)
    return logits_V.double() / temperature + gumbel(key, tokens)


@torch.inference_mode()
def last_logits(model: Llama, sequence: list[int], width: int) -> Tensor:
    """Logits (N, V) after each of the last `width` tokens of a sequence, which are read at once."""
    start = len(sequence) - width
    cache = FullCache.allocate(
        model.config, 1, len(sequence), dtype=model.dtype, device=model.device
    )
    for _ in prefill(model, sequence[: start + 1], cache, 0, chunk=1024):
        pass
    return model.logits(read_block(model, [sequence[start:]], cache)[0])
