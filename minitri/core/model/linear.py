"""Linear layers and LM heads in plain PyTorch, which `minitri/devices` may replace."""

import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """Linear layer y = x W^T + b with W of shape (out_features, in_features)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features = weight.shape[0]
        self.in_features = weight.shape[-1]
        self.weight = weight
        self.bias = bias

    @classmethod
    def empty(
        cls, in_features: int, out_features: int, *, dtype: torch.dtype, bias: bool = False
    ) -> Self:
        """A layer with uninitialised weights, to be filled from a checkpoint."""
        shapes = [(out_features, in_features), (out_features,)][: 1 + bias]
        weights = (torch.empty(shape, dtype=dtype) for shape in shapes)
        return cls(*(nn.Parameter(weight, requires_grad=False) for weight in weights))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class TiedHead(Linear):
    """An LM head that is also the embedding table: y = x W^T, and rows of W by token id."""

    def rows(self, tokens: Tensor) -> Tensor:
        """Embeddings (..., in_features) of token ids (...)."""
        return F.embedding(tokens, self.weight)


class TrimmedHead(nn.Module):
    """An LM head over part of the vocabulary; all other tokens have logit -inf, so q = 0."""

    token_ids: Tensor  # token id of each output of `linear`

    def __init__(
        self, in_features: int, num_tokens: int, vocab_size: int, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.linear = Linear.empty(in_features, num_tokens, dtype=dtype)
        self.vocab_size = vocab_size
        self.register_buffer("token_ids", torch.zeros(num_tokens, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        known = self.linear(x)
        logits = known.new_full((*known.shape[:-1], self.vocab_size), -math.inf)
        return logits.index_copy_(-1, self.token_ids, known)
