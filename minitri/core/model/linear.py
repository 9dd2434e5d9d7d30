"""Linear layers, LM heads and embedding tables in plain PyTorch, which `devices` may replace."""

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
    def empty(cls, E: int, N: int, *, dtype: torch.dtype, bias: bool = False) -> Self:
        """A layer with uninitialised W (N, E) and, if `bias`, b (N,), which a checkpoint fills."""
        shapes = [(N, E), (N,)][: 1 + bias]
        weights = (torch.empty(shape, dtype=dtype) for shape in shapes)
        return cls(*(nn.Parameter(weight, requires_grad=False) for weight in weights))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Table(Linear):
    """Embedding table W of shape (V, E)."""

    def rows(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class TiedHead(Table):
    """An LM head that is also the embedding table: y = x W^T, and rows of W by token id."""


class TrimmedHead(nn.Module):
    """An LM head over N of V tokens; the others have logit -inf, so draft probability 0."""

    token_ids: Tensor  # token id of each output of `linear`

    def __init__(self, E: int, N: int, V: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = Linear.empty(E, N, dtype=dtype)
        self.vocab_size = V
        self.register_buffer("token_ids", torch.zeros(N, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        known = self.linear(x)
        logits = known.new_full((*known.shape[:-1], self.vocab_size), -math.inf)
        return logits.index_copy_(-1, self.token_ids, known)
