"""Drafts several tokens with a draft model in one call of the compiled CPU kernels.

A round samples N tokens, one after the other, with the bits of single passes.

Legend: B rows, T tokens of a block before the guesses, N guesses, E hidden size, V vocab, S slots.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from minitri.core.model.cache import Cache
from minitri.core.model.linear import TiedHead, TrimmedHead
from minitri.core.model.llama import Llama
from minitri.core.settings import SamplingParams
from minitri.devices.cpu.abi import FilterArguments, RoundArguments
from minitri.devices.cpu.kernel_layers import KernelHead, KernelLayers, KernelTable, matrix_of
from minitri.devices.cpu.kernels import require, set_filters
from minitri.devices.cpu.quantized import Form


class DraftRound:
    """A draft model on compiled kernels that guesses whole rounds: see `model.execution.Round`."""

    def __init__(self, model: Llama, lender: Llama) -> None:
        """`model` uses the embedding table of `lender`, in the same dtype, or its own."""
        head = model.lm_head
        ids = head.token_ids if isinstance(head, TrimmedHead) else None
        head = head.linear if isinstance(head, TrimmedHead) else head
        assert isinstance(head, KernelHead)
        assert isinstance(model.layers, KernelLayers)
        self._head = head
        self._layers = model.layers
        self._ids_2N = None if ids is None else torch.stack((ids, ids.sort().values))
        table = lender.lm_head if isinstance(lender.lm_head, TiedHead) else lender.embed_tokens
        self._table_VX = table.weight
        self._table_form = table.form if isinstance(table, KernelTable) else Form.PLAIN
        self._norm_E = model.norm.weight
        self._rope = model.rope
        self._rotary = self._rope.at(torch.arange(0))  # grows with the longest cache
        self._num_tokens = model.config.vocab_size
        known = torch.arange(self._num_tokens) if ids is None else ids
        require(
            len(self._table_VX) >= self._num_tokens and self._table_VX.is_contiguous(),
            (lender.config.hidden_size, lender.dtype) == (head.in_features, model.dtype),
            (known.dtype, len(known)) == (torch.int64, head.out_features),
            0 <= int(known.min()) <= int(known.max()) < self._num_tokens,
            tensors=(self._table_VX, ids),
        )

    def guess(
        self,
        cache: Cache,
        blocks: list[list[int]],
        uniforms_BN: Tensor,
        sampling: Sequence[SamplingParams],
        vocab_size: int,
    ) -> tuple[Tensor, Tensor]:
        """One round: N guesses (B, N) and distributions (B, N, V), see `model.execution.Round`."""
        B, N = uniforms_BN.shape
        T = max(map(len, blocks))
        S = cache.capacity
        require(
            uniforms_BN.dtype == torch.float64 and uniforms_BN.is_contiguous(),
            B == len(blocks) == len(sampling) and N > 0 and min(map(len, blocks)) > 0,
            max(cache.lengths) + T + N - 1 <= S,
            tensors=(uniforms_BN,),
        )
        if len(self._rotary.cos) < S:
            self._rotary = self._rope.at(torch.arange(S))
        block_BT = torch.tensor([row + [0] * (T - len(row)) for row in blocks])
        num_read_B = torch.tensor([len(row) for row in blocks])
        x_BTE = torch.empty(B, T, self._head.in_features, dtype=self._norm_E.dtype)
        tokens_BN = torch.empty(B, N, dtype=torch.int64)
        probs_BNV = torch.empty(B, N, vocab_size)
        lengths_B = torch.tensor(cache.lengths)
        filters_B = (FilterArguments * B)()
        for filters, params in zip(filters_B, sampling, strict=True):
            set_filters(filters, params)
            filters.V = min(vocab_size, self._num_tokens)
        first = self._layers.arguments(x_BTE, cache, lengths_B)
        arguments = RoundArguments(first=first, block=block_BT, num_read=num_read_B)
        arguments.fill(cos=self._rotary.cos, sin=self._rotary.signed_sin, norm=self._norm_E)
        arguments.fill(embeddings=self._table_VX, form=self._table_form)
        arguments.fill(num_tokens=self._num_tokens, head=matrix_of(self._head), ids=self._ids_2N)
        arguments.fill(filters=ctypes.addressof(filters_B), uniforms=uniforms_BN)
        arguments.fill(tokens=tokens_BN, probs=probs_BNV, N=N, width=vocab_size)
        self._layers.kernels.call("round", arguments, x_BTE.dtype)
        return tokens_BN, probs_BNV
