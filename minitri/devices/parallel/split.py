"""Tensor parallelism: a Llama split by heads, MLP and vocabulary (Megatron-LM, arXiv 1909.08053).

Outputs of attention and MLP, and embeddings, are summed over the ranks; logits are gathered. The
`config` on a rank is that of its share, except for the vocabulary. Retrieved chunks are selected
per KV head, so caches send nothing.
Legend: E hidden size, R rows of the vocabulary on a rank, V vocab.
"""

import dataclasses
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from minitri.core.config import ModelConfig
from minitri.core.model.execution import Execution, Ranks
from minitri.core.model.llama import Llama
from minitri.devices.parallel.group import RankGroup

COLUMNS = ("o_proj", "down_proj")  # matrices that are split by columns; others by rows
TABLES = ("embed_tokens", "lm_head")  # matrices whose rows may not divide evenly


class SplitLlama(Llama):
    """A rank's share of a Llama; all ranks call its methods together."""

    ranks: RankGroup

    def __init__(self, config: ModelConfig, *, ranks: RankGroup, **options: Any) -> None:
        """Makes this rank's share, with empty weights; `options` as for `Llama`.
        Raises `InputError` if the model cannot be split."""
        share = config.share(ranks.count)
        super().__init__(share, **options)
        self.ranks = ranks
        self._num_rows = share.vocab_size
        self.execution = Execution(ranks=ranks)
        self.config = dataclasses.replace(share, vocab_size=config.vocab_size)

    def add_up(self) -> None:
        """Makes o_proj and down_proj sum their outputs over all ranks; called after loading."""
        for name, layer in list(self.named_modules()):
            if name.endswith(COLUMNS):
                self.set_submodule(name, Summed(layer, self.ranks))

    def embed(self, tokens: Tensor) -> Tensor:
        if self.lent_embedding:
            return super().embed(tokens)
        numbers = tokens - self.ranks.rank * self._num_rows  # outside the share for most tokens
        nearest = numbers.clamp(0, self._num_rows - 1)
        return self.ranks.sum(super().embed(nearest).where((nearest == numbers).unsqueeze(-1), 0))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ranks.gather(super().logits(hidden))[..., : self.config.vocab_size]


class Summed(nn.Module):
    """A linear layer over this rank's share of its inputs, summed over all ranks."""

    def __init__(self, part: nn.Module, ranks: RankGroup) -> None:
        super().__init__()
        self.part = part
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.ranks.sum(self.part(x))


def share(name: str, tensor: Tensor, ranks: Ranks) -> Tensor:
    """This rank's share of a checkpoint's tensor `name`: some rows or columns; norms are whole."""
    module, kind = f".{name}".split(".")[-2:]
    is_bias = kind == "bias"
    if ranks.count == 1 or tensor.dim() != 2 - is_bias:
        return tensor  # of a norm, or of a wrong shape, which loading refuses
    if module in COLUMNS and is_bias:  # one rank adds the bias
        return tensor if ranks.rank == 0 else tensor.new_zeros(tensor.shape)
    if module in TABLES:
        num_rows = -(-len(tensor) // ranks.count)
        part_RE = tensor[ranks.rank * num_rows :][:num_rows]
        return F.pad(part_RE, (0, 0, 0, num_rows - len(part_RE)))
    return tensor.tensor_split(ranks.count, int(module in COLUMNS))[ranks.rank]
