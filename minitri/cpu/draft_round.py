"""Rounds of a draft model in one call of the compiled kernels: embedding, layers, LM head, filters
and sampling of N tokens, one after the other. Tokens and distributions have the bits of those that
single passes give.

Legend: B rows, T tokens of the block before the guesses, E hidden size, V vocab, S slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minitri.cpu.kernel_layers import KernelHead, KernelLayers, KernelTiedHead
from minitri.cpu.kernels import require, struct_of
from minitri.cpu.quantized import Form
from minitri.model.cache import Cache
from minitri.model.linear import TrimmedHead
from minitri.model.llama import Llama
from minitri.settings import SamplingParams


class DraftRound:
    """A draft model on kernels, which guesses as `model.execution.Round` says."""

    def __init__(self, model: Llama, lender: Llama) -> None:
        """`lender` has the embeddings, all of them and in the drafter's number type."""
        head = model.lm_head
        self._ids = head.token_ids if isinstance(head, TrimmedHead) else None
        linear = head.linear if isinstance(head, TrimmedHead) else head
        assert isinstance(linear, KernelHead)
        assert isinstance(model.layers, KernelLayers)
        self._layers, self._head = model.layers, linear
        self._num_tokens = model.config.vocab_size
        tied = lender.lm_head if isinstance(lender.lm_head, KernelTiedHead) else None
        self._table = lender.embed_tokens if tied is None else tied.weight
        self._table_form = Form.PLAIN if tied is None else tied.form
        self._norm_E = model.norm.weight
        self._rope = model.rope
        self._turns = self._rope.at(torch.arange(0))  # of as many slots as were needed so far
        require(
            lender.dtype == model.dtype and len(self._table) >= self._num_tokens,
            self._table.is_contiguous() and lender.config.hidden_size == linear.in_features,
            self._ids is None
            or (self._ids.dtype, self._ids.shape) == (torch.int64, (linear.out_features,)),
            tensors=(self._table, self._ids),
        )

    def guess(
        self,
        cache: Cache,
        packed_4BT: Tensor,
        uniforms_BN: Tensor,
        sampling: Sequence[SamplingParams],
        vocab_size: int,
    ) -> tuple[Tensor, Tensor]:
        """See `model.execution.Round`."""
        _, B, T = packed_4BT.shape
        N = uniforms_BN.shape[1]
        S = cache.capacity
        if len(self._turns.cos) < S:
            self._turns = self._rope.at(torch.arange(S))
        kernels = self._layers.kernels
        lasts = packed_4BT[3, :, 0].contiguous()
        require(
            (packed_4BT.dtype, uniforms_BN.dtype) == (torch.int64, torch.float64),
            packed_4BT.is_contiguous() and uniforms_BN.is_contiguous(),
            len(packed_4BT) == 4 and len(uniforms_BN) == len(sampling) == B and N > 0,
            0 <= int(lasts.min()) <= int(lasts.max()) < T,
            max(cache.lengths) + T + N - 1 <= S,
            tensors=(packed_4BT, uniforms_BN),
        )
        x_BTE = torch.empty(B, T, self._head.in_features, dtype=self._head.dtype)
        tokens_BN = torch.empty(B, N, dtype=torch.int64)
        probs_BNV = torch.empty(B, N, vocab_size)
        V = min(vocab_size, self._num_tokens)
        common = (None, None, 1, V)
        filters = [(*common, it.top_k, 1, *map(float, it.numbers)) for it in sampling]
        filters_B = torch.frombuffer(
            bytearray(b"".join(struct_of(*it) for it in filters)), dtype=torch.uint8
        )
        head = self._head
        arguments = struct_of(
            *self._layers.fields(x_BTE, cache),
            *(packed_4BT, lasts, self._turns.cos, self._turns.signed_sin),
            *(self._table, self._num_tokens, self._table.stride(0) * self._table.itemsize),
            *(self._table_form, self._norm_E),
            *(head.weight, head.bias, head.out_features, head.in_features, head.form, self._ids),
            *(filters_B, uniforms_BN, tokens_BN, probs_BNV, N, vocab_size),
        )
        kernels.call("round", x_BTE.dtype, arguments)
        return tokens_BN, probs_BNV
