"""Captured steps: on a GPU, the way from a block of tokens to distributions as CUDA graphs.

A step is captured per block size, with the filters that a run uses. Their numbers (temperature,
top-p, min-p) are a tensor, so other numbers need no new capture; their form (`SamplingParams.form`)
is fixed.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from minitri.decoding.sampling import filtered_probs, greedy_probs, pad_vocabulary
from minitri.gpu.graphs import GraphedStep, GraphPool
from minitri.model.block import Block, forward_block, make_block
from minitri.model.cache import Cache
from minitri.model.llama import Llama
from minitri.settings import LONGEST_BLOCK, SamplingParams


class CapturedSteps:
    """Steps of one model over one cache, for several block sizes."""

    @torch.no_grad()
    def __init__(
        self,
        model: Llama,
        cache: Cache,
        filters: SamplingParams,
        graphs: GraphPool,
        block_sizes: Collection[int],
        *,
        vocab_size: int,
        queries_LBTHD: Tensor | None,
    ) -> None:
        """Captures now, so that it costs no decoding time.

        What a capture writes into the cache stands after the prefixes. Blocks of more than
        `LONGEST_BLOCK` tokens go by lengths on the host, which a graph would freeze.
        """
        numbers_3 = torch.tensor(filters.numbers, dtype=torch.float64).to(model.device)
        self._form = filters.form
        self._numbers_3 = numbers_3
        self.by_size: dict[int, GraphedStep[Block]] = {}

        def step(block: Block) -> Tensor:
            hidden_BTE = forward_block(model, block, cache, queries_LBTHD)
            logits_BTV = model.logits(hidden_BTE)[..., :vocab_size]
            probs_QV = probs_by_tensor(logits_BTV.flatten(0, 1), filters, numbers_3)
            return pad_vocabulary(probs_QV.unflatten(0, logits_BTV.shape[:2]), vocab_size)

        for size in sorted(size for size in block_sizes if size <= LONGEST_BLOCK):
            example = make_block(model, [[0] * size for _ in cache.lengths], cache, size)
            self.by_size[size] = graphs.capture(step, example)

    def size_for(self, T: int) -> int | None:
        """The smallest captured size that holds blocks of T tokens; None if there is none."""
        return min((size for size in self.by_size if size >= T), default=None)

    def can_sample_by(self, sampling: SamplingParams) -> bool:
        """Whether the steps can apply these filters, too."""
        return sampling.temperature == 0 or sampling.form == self._form

    def sample_by(self, sampling: SamplingParams) -> None:
        """Changes the numbers of the filters."""
        self._numbers_3.copy_(torch.tensor(sampling.numbers, dtype=torch.float64))


def probs_by_tensor(logits_NV: Tensor, filters: SamplingParams, numbers_3: Tensor) -> Tensor:
    """`probs_from_logits` by numbers on the device (`SamplingParams.numbers`).

    Of `filters` only `filters.form` counts. Nothing is asked of the host, so a captured step
    follows other numbers when the tensor is given others.
    """
    probs_NV = filtered_probs(logits_NV, filters, *numbers_3, sort_all=True)
    return torch.where(numbers_3[0] == 0, greedy_probs(logits_NV), probs_NV)
