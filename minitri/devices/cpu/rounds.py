"""Passes of a model, from tokens to logits, samples or a verdict, in one call of the CPU kernels.

A call is a round: one pass, or N of them, of which each samples a token, with the bits of single
ones. The last norm is part of the LM head, so nothing is rounded to 16 bits between them.
Legend: B rows, T tokens of a block, N guesses, E hidden size, V vocab; packed_4BT: `pack_block`.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from minitri.core.decoding.verification import Guesses, Rule, verify, verify_block
from minitri.core.model.linear import TiedHead, TrimmedHead
from minitri.core.model.llama import Llama
from minitri.core.runner import ModelRunner
from minitri.devices.cpu.abi import FilterArguments, RoundArguments, VerifyArguments
from minitri.devices.cpu.kernel_layers import KernelLayers, matrix_of
from minitri.devices.cpu.kernels import filters_of, require, verify_arguments


class KernelRounds:
    """A model on compiled kernels, whose passes are computed whole, in one call each."""

    def __init__(self, model: Llama, lender: Llama) -> None:
        """Computes `model`; `lender`, the target or `model`, has the embedding table for it."""
        self._rotary = model.rope.at(torch.arange(0))  # grows with the longest text
        self._weights = RoundArguments(norm=model.norm.weight)
        head = model.lm_head
        if isinstance(head, TrimmedHead):
            ids = head.token_ids  # by output
            self._weights.ids = torch.stack((ids, ids.sort().values))
            head = head.linear
        table = lender.lm_head if isinstance(lender.lm_head, TiedHead) else lender.embed_tokens
        self._weights.fill(head=matrix_of(head), table=matrix_of(table))

    def read(self, runner: ModelRunner, *inputs: Tensor) -> Tensor:
        """Logits (B, N + 1, V) after each row's last token and guesses; `inputs`: `packed_4BT`,
        guesses (B, N) or tokens (B,) in place of the block's only ones, and perhaps a mask."""
        packed_4BT, tokens, *masks = inputs
        if tokens.dim() == 1:
            packed_4BT[0, :, 0] = tokens
            tokens = tokens.new_empty(len(tokens), 0)
        B, N = tokens.shape
        logits_BNV = torch.empty(B, N + 1, runner.passes.vocab_size)
        guesses = VerifyArguments(tokens=tokens.contiguous(), N=N)
        self._call(runner, packed_4BT, *masks, P=N + 1, logits=logits_BNV, guesses=guesses)
        return logits_BNV

    def verify(
        self,
        runner: ModelRunner,
        packed_4BT: Tensor,
        numbers_BN: Tensor,
        guesses: Guesses,
        rule: Rule,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and distributions (B, N + 1, V) after each row's last token and N guesses, and
        their packed `Verdict` by `rule` and random numbers (B, N + 1)."""
        B, P = numbers_BN.shape
        logits_BNV, probs_BNV = torch.empty(2, B, P, runner.passes.vocab_size)
        arguments = VerifyArguments(tokens=guesses.tokens_BN.contiguous(), N=P - 1)
        verdict = None
        if rule in (verify, verify_block):
            arguments, verdict = verify_arguments(probs_BNV, numbers_BN, guesses)
        outputs = {"logits": logits_BNV, "probs": probs_BNV, "guesses": arguments}
        self._call(runner, packed_4BT, option=rule is verify_block, P=P, **outputs)
        verdict = verdict or rule(probs_BNV, numbers_BN, guesses)
        return logits_BNV, probs_BNV, verdict.packed(guesses)

    def draft(
        self, runner: ModelRunner, packed_4BT: Tensor, numbers_BN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Samples N tokens (B, N) after each row's block, one after the other, by uniforms in
        [0, 1), float64, or by int64 keys of Gumbel noise. Returns them, and the distributions
        (B, N, V) that they were sampled from."""
        B, N = numbers_BN.shape
        is_coupled = numbers_BN.dtype == torch.int64
        require(
            is_coupled or numbers_BN.dtype == torch.float64,
            numbers_BN.is_contiguous() and packed_4BT.shape[1] == B and N > 0,
            tensors=(numbers_BN,),
        )
        tokens_BN = torch.empty(B, N, dtype=torch.int64)
        probs_BNV = torch.empty(B, N, runner.passes.vocab_size)
        outputs: dict[str, Any] = {"tokens": tokens_BN, "probs": probs_BNV}
        self._call(runner, packed_4BT, N=N, numbers=numbers_BN, is_coupled=is_coupled, **outputs)
        return tokens_BN, probs_BNV

    def _call(
        self,
        runner: ModelRunner,
        packed_4BT: Tensor,
        mask_TT: Tensor | None = None,
        *,
        option: int = 0,
        **fields: Any,
    ) -> None:
        """Runs a round of N passes with P outputs per row, by default 1, and other such `fields`
        of its arguments; `option`: whether the verdict is that of block verification."""
        model, cache, width = runner.model, runner.cache, runner.passes.vocab_size
        fields = {"N": 1, "P": 1, "V": min(width, model.config.vocab_size), "width": width} | fields
        _, B, T = packed_4BT.shape
        num_positions = max(cache.next_positions) + T + fields["N"]
        if len(self._rotary.cos) < num_positions:  # with those of the next 1,024 tokens
            self._rotary = model.rope.at(torch.arange(num_positions + 1024))
        require(
            (packed_4BT.dtype, len(packed_4BT)) == (torch.int64, 4) and packed_4BT.is_contiguous(),
            len(runner.sampling) == B and fields["P"] <= T,
            max(cache.lengths) + T + fields["N"] - 1 <= cache.capacity,
            tensors=(packed_4BT,),
        )
        layers: Any = model.layers
        cos = self._rotary.cos
        x_BTE = torch.empty(B, T, model.config.hidden_size, dtype=model.dtype)
        arguments = RoundArguments.from_buffer_copy(self._weights)
        arguments.first = layers.arguments(x_BTE, cache, mask_TT, runner.passes.queries_LBTHD)
        arguments.fill(cos=cos, sin=self._rotary.signed_sin, positions=len(cos), **fields)
        arguments.block = packed_4BT
        if "probs" in fields:
            filters = [filters_of(params, V=fields["V"]) for params in runner.sampling]
            filters_B = (FilterArguments * B)(*filters)
            arguments.filters = ctypes.addressof(filters_B)
        layers.kernels.call("round", arguments, x_BTE.dtype, option)


def rounds_of(model: Llama) -> KernelRounds | None:
    """Rounds of a model on compiled kernels; None if its options, or the number type of the target
    that lends it embeddings, allow none."""
    lender = getattr(model.lent_embedding, "__self__", model)  # the target, by its bound `embed`
    are_plain = lender.config.is_plain and model.config.is_plain and lender.dtype == model.dtype
    are_compiled = type(lender.layers) is type(model.layers) is KernelLayers
    return KernelRounds(model, lender) if are_plain and are_compiled else None
