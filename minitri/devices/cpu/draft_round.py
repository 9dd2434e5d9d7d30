"""Drafts several tokens with a draft model in one call of the compiled CPU kernels.

A round samples N tokens of each row in turn, with the same bits as by one pass for each.
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
from minitri.devices.cpu.kernel_layers import KernelLayers, matrix_of
from minitri.devices.cpu.kernels import filters_of, require


class DraftRound:
    """A draft model on compiled kernels, which guesses several tokens per row in one call."""

    def __init__(self, model: Llama, lender: Llama) -> None:
        """Drafts with `model`; `lender`, the target or `model`, has the embedding table for it."""
        assert isinstance(model.layers, KernelLayers)
        self._layers = model.layers
        # Not the model itself, which has this round: a cycle would keep the weights in memory.
        self._rope, self._config, self._dtype = model.rope, model.config, model.dtype
        self._rotary = model.rope.at(torch.arange(0))  # grows with the longest cache
        self._weights = RoundArguments(norm=model.norm.weight)
        head = model.lm_head
        if isinstance(head, TrimmedHead):
            ids = head.token_ids  # by output
            self._weights.ids = torch.stack((ids, ids.sort().values))
            head = head.linear
        table = lender.lm_head if isinstance(lender.lm_head, TiedHead) else lender.embed_tokens
        self._weights.fill(head=matrix_of(head), table=matrix_of(table))

    def guess(
        self,
        cache: Cache,
        blocks: list[list[int]],
        uniforms_BN: Tensor,
        sampling: Sequence[SamplingParams],
        vocab_size: int,
    ) -> tuple[Tensor, Tensor]:
        """Reads each row's new tokens, `blocks`, and samples N more (B, N) by uniforms in [0, 1).
        Returns these, and the distributions (B, N, vocab_size) that they were sampled from."""
        B, N = uniforms_BN.shape
        num_read = [*map(len, blocks)]
        T = max(num_read)
        S = cache.capacity
        require(
            uniforms_BN.dtype == torch.float64 and uniforms_BN.is_contiguous(),
            B == len(blocks) == len(sampling) and N > 0 and min(num_read) > 0,
            max(cache.lengths) + T + N - 1 <= S,
            tensors=(uniforms_BN,),
        )
        if len(self._rotary.cos) < S:
            self._rotary = self._rope.at(torch.arange(S))
        config = self._config
        V = min(vocab_size, config.vocab_size)
        filters_B = (FilterArguments * B)(*(filters_of(params, V=V) for params in sampling))
        x_BTE = torch.empty(B, T, config.hidden_size, dtype=self._dtype)
        tokens_BN = torch.empty(B, N, dtype=torch.int64)
        probs_BNV = torch.empty(B, N, vocab_size)
        arguments = RoundArguments.from_buffer_copy(self._weights)
        arguments.first = self._layers.arguments(x_BTE, cache)
        arguments.block = torch.tensor([row + [0] * (T - len(row)) for row in blocks])
        arguments.fill(cos=self._rotary.cos, sin=self._rotary.signed_sin, N=N, width=vocab_size)
        arguments.fill(filters=ctypes.addressof(filters_B), uniforms=uniforms_BN)
        arguments.fill(tokens=tokens_BN, probs=probs_BNV, num_read=torch.tensor(num_read))
        self._layers.kernels.call("round", arguments, x_BTE.dtype)
        return tokens_BN, probs_BNV
