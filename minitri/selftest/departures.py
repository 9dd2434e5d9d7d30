"""Explains a difference between two runs that should write the same text: rounding, or a bug.

Where the texts part, the logits are computed once more in float32 and in the dtype in use. Rounding
explains a difference if in float32 both tokens score within `bound` of the best one. `bound` is
twice the largest difference, over the vocabulary, between the logits of both dtypes (one for each
of the two runs), divided by the temperature where tokens are sampled.

Legend: N tokens, V vocab.
"""

import torch
from torch import Tensor

from minitri.caches.full import FullCache
from minitri.decoding.noise import gumbel, noise_key
from minitri.model.block import read_block
from minitri.model.llama import Llama
from minitri.runner import prefill


def explain(
    model: Llama,
    exact: Llama,
    sequence: list[int],
    tokens: tuple[int, int],
    *,
    temperature: float,
    seed: int,
    block: int,
) -> dict[str, float]:
    """Compares the logits after `sequence` in the dtype of `model` and, by `exact`, in float32,
    where the expected token and the one that came are `tokens`.

    Returns `position`, that of the token in the text; `top2_gap`, between the two best logits in
    the dtype; `score_gap`, how far the worse one of the two tokens scores below the best of all in
    float32; and `bound`, what rounding explains of that.

    The dtype's error is measured on logits read as decoding reads them, alone and at the end of a
    block of `block` tokens. It is at least the spacing of the dtype's numbers at the largest logit.
    """
    exact_V = last_logits(exact, sequence, 1)[-1]
    widths = (1, min(block, len(sequence)))
    used_NV = torch.stack([last_logits(model, sequence, width)[-1] for width in widths])
    spacing = torch.finfo(model.dtype).eps * float(exact_V.abs().max())
    error = max(float((used_NV - exact_V).abs().max()), spacing)
    scores_V = scores(exact_V, temperature, seed, len(sequence))
    return {
        "position": len(sequence),
        "expected": tokens[0],
        "got": tokens[1],
        "top2_gap": float(used_NV[0].topk(2).values.diff().abs()),
        "score_gap": float(scores_V.max() - scores_V[list(tokens)].min()),
        "bound": 2 * error / (temperature or 1.0),
    }


def scores(logits_V: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """What the token at a position is the argmax of, in float64, up to a constant.

    That is the logits, or the logarithm of the distribution plus Gumbel noise.
    """
    if not temperature:
        return logits_V.double()
    tokens = torch.arange(len(logits_V), device=logits_V.device)
    keys = torch.full_like(tokens, noise_key(seed, position))
    return logits_V.double() / temperature + gumbel(keys, tokens)


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
