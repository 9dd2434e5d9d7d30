"""Transformer blocks on a GPU whose elementwise operations are compiled.

Launches cost a microsecond or two each. `torch.compile` makes one kernel each of a residual
addition with the norm after it, of RoPE, and of SiLU with its product. Kernels take any number M of
tokens, but M = 1 has one of its own. As B and T are one dimension, these two kernels, compiled at
loading, serve all blocks of a model: PyTorch compiles a function at most 8 times.
Legend: B batch, T tokens, M = B T, E hidden size, H heads, D head dim.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from minitri.core.log import log
from minitri.core.model.llama import Layer, Layers, Llama, Pass, gate
from minitri.core.model.rope import Rotary
from minitri.devices.gpu.attention_backends import TOLERANCES
from minitri.devices.gpu.kernels import problem_with
from minitri.devices.replace import replace_modules


def add_norm(x: Tensor, change: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the sum x + change, and the RMSNorm of the sum."""
    total = x + change
    return total, torch.rms_norm(total, weight_E.shape, weight_E, eps)


def rotate(x_MHD: Tensor, cos_M1D: Tensor, signed_sin_M1D: Tensor) -> Tensor:
    """Rotates all heads of M tokens by their positions (RoPE); same shape and dtype."""
    return Rotary(cos_M1D, signed_sin_M1D).rotate(x_MHD)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of tensors as one GPU kernel, which is compiled when it is first called."""
    return torch.compile(function, dynamic=True)


class FusedRotary(Rotary):
    """Rotary embedding by one compiled kernel; cosines and sines are (M, 1, D)."""

    def rotate(self, x_BTHD: Tensor) -> Tensor:
        return compiled(rotate)(x_BTHD.flatten(0, 1), self.cos, self.signed_sin).view_as(x_BTHD)


class FusedLayers(Layers):
    """All transformer blocks; a block's first kernel adds the MLP output of the block before."""

    def forward(self, x_BTE: Tensor, shared: Pass) -> Tensor:
        turns = (shared.rotary.cos, shared.rotary.signed_sin)
        shared = replace(shared, rotary=FusedRotary(*(it.flatten(0, 1) for it in turns)))
        add = compiled(add_norm)
        x_ME = x_BTE.flatten(0, 1)
        change_ME = torch.zeros_like(x_ME)
        for number in shared.layers or range(len(self)):
            layer = self[number]
            assert isinstance(layer, Layer)
            norm = layer.input_layernorm
            x_ME, normed_ME = add(x_ME, change_ME, norm.weight, norm.eps)
            mixed_BTE = layer.self_attn.forward(normed_ME.view_as(x_BTE), number, shared)
            norm = layer.post_attention_layernorm
            x_ME, normed_ME = add(x_ME, mixed_BTE.flatten(0, 1), norm.weight, norm.eps)
            change_ME = layer.mlp.down_proj(compiled(gate)(layer.mlp.gate_up_proj(normed_ME)))
        return (x_ME + change_ME).view_as(x_BTE)


def fuse_if_possible(model: Llama) -> Llama:
    """A copy of the model with compiled kernels, on a GPU where they work; else the model."""
    is_off = os.environ.get("MINITRI_KERNELS") == "off" or not model.config.is_plain
    if model.device.type != "cuda" or is_off:
        return model
    if problem := problem_with(lambda: check_kernels(model)):
        log.warning("compiled kernels are not used (%s); decoding is slower", problem)
        return model
    return replace_modules(model, {Layers: FusedLayers})


@torch.inference_mode()
def check_kernels(model: Llama) -> None:
    """Raises an error if a kernel cannot be compiled for a model, or differs from plain PyTorch."""
    tolerance = TOLERANCES[model.dtype]
    generator = torch.Generator().manual_seed(0)
    for M in (1, 3):
        x_MXD = torch.randn(M, 9, 64, generator=generator).to(model.device, model.dtype)
        x_MHD = x_MXD[:, :6]  # a part, as in a model: kernels depend on that
        x_ME = torch.randn(M, model.config.hidden_size, generator=generator).to(x_MHD)
        angles = x_MHD[:, :1].float()
        for function, *inputs in (
            (add_norm, x_ME, x_ME.flip(1), model.norm.weight, model.norm.eps),
            (gate, x_ME),
            (rotate, x_MHD, angles.cos(), angles.sin()),
        ):
            got = compiled(function)(*inputs)
            torch.testing.assert_close(got, function(*inputs), rtol=tolerance, atol=tolerance)
