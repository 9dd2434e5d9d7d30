"""The network on a GPU with fused kernels: what `fuse` puts in the place of a model's modules.

A pass of decoding is made of launches, each of which costs a microsecond or two besides the few
that it works. So what stands between the matrices is one kernel each (`kernels/elementwise.py`):
RoPE with the writing of K and V, the residual addition with the norm after it, and SiLU with its
product. The plain modules are the oracle. Blocks without slots on the device (a prefill's), caches
that are more than tensors (host memory's) and norms of heads leave RoPE and writing plain.

Legend: L layers, B batch, T tokens, S slots, E hidden size, H query heads, K KV heads, D head dim,
X = (H + 2 K) D.
"""

import logging
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitri.caches.full import FullCache
from minitri.caches.retrieval import RetrievalCache
from minitri.caches.streaming import StreamingCache
from minitri.gpu.attention_backends import TOLERANCES
from minitri.gpu.kernels import problem_with
from minitri.model.llama import MLP, Attention, Layer, Layers, Llama, Pass
from minitri.model.replace import replace_modules

log = logging.getLogger("minitri")

WRITABLE = (FullCache, RetrievalCache, StreamingCache)
"""Caches that are nothing but tensors (L, B, K, S, D), into which a kernel may write."""


class FusedAttention(Attention):
    """Attention whose queries are rotated and whose K and V are written by one kernel."""

    def __init__(self, plain: Attention) -> None:
        nn.Module.__init__(self)
        self.heads = plain.heads
        self.head_dim = plain.head_dim
        self.qkv_proj = plain.qkv_proj
        self.o_proj = plain.o_proj
        self.q_norm = plain.q_norm
        self.k_norm = plain.k_norm

    def mix(self, qkv_BTX: Tensor, layer: int, shared: Pass) -> Tensor:
        cache = shared.cache
        if shared.slots_BT is None or self.q_norm is not None or type(cache) not in WRITABLE:
            return super().mix(qkv_BTX, layer, shared)
        from minitri.gpu.kernels.elementwise import rotate_to_cache

        assert isinstance(cache, WRITABLE)
        slots = (cache.keys[layer], cache.values[layer])
        last = max(cache.lengths) + qkv_BTX.shape[1]
        if last > slots[0].shape[2]:
            raise IndexError(f"a block that ends at slot {last} of {slots[0].shape[2]}")
        q_BTHD = rotate_to_cache(
            qkv_BTX,
            self.heads[:2],
            shared.rotary,
            shared.slots_BT,
            *slots,
            raw_keys_BKSD=cache.raw_keys[layer] if isinstance(cache, StreamingCache) else None,
            queries_BWHD=None if shared.queries_LBTHD is None else shared.queries_LBTHD[layer],
        )
        out_BTHD = shared.attend(q_BTHD, *slots, cache.lengths, shared.rule_TT, shared.lengths_B)
        return out_BTHD.flatten(2)


class FusedMLP(MLP):
    """SwiGLU with one kernel between its matrices."""

    def __init__(self, plain: MLP) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj = plain.gate_up_proj
        self.down_proj = plain.down_proj

    def forward(self, x_BTE: Tensor) -> Tensor:
        from minitri.gpu.kernels.elementwise import silu_times

        return self.down_proj(silu_times(self.gate_up_proj(x_BTE)))


class FusedLayers(Layers):
    """All transformer blocks; each adds what the one before it has left to add."""

    def forward(self, x_BTE: Tensor, shared: Pass) -> Tensor:
        from minitri.gpu.kernels.elementwise import add_norm

        change_BTE = torch.zeros_like(x_BTE)
        for number, layer in enumerate(self):
            assert isinstance(layer, Layer)
            x_BTE, normed_BTE = add_norm(x_BTE, change_BTE, layer.input_layernorm)
            mixed_BTE = layer.self_attn.forward(normed_BTE, number, shared)
            x_BTE, normed_BTE = add_norm(x_BTE, mixed_BTE, layer.post_attention_layernorm)
            change_BTE = layer.mlp.forward(normed_BTE)
        return x_BTE + change_BTE


def fuse(model: Llama) -> Llama:
    """A model on fused kernels, which shares all weights of this one."""
    return replace_modules(model, {Attention: FusedAttention, MLP: FusedMLP, Layers: FusedLayers})


def fuse_if_possible(model: Llama) -> Llama:
    """The model on fused kernels on a GPU where they work; elsewhere the model as it is.

    The environment variable MINITRI_KERNELS=off stands for no kernels.
    """
    if model.device.type != "cuda" or os.environ.get("MINITRI_KERNELS") == "off":
        return model
    problem = problem_with(lambda: largest_error(model), TOLERANCES[model.dtype])
    if not problem:
        return fuse(model)
    log.warning("fused kernels are not used (%s); decoding is slower", problem)
    return model


@torch.no_grad()
def largest_error(model: Llama) -> float:
    """Distance from plain operations on a random block, relative next to numbers above 1."""
    from minitri.gpu.kernels.elementwise import add_norm, rotate_to_cache, silu_times

    config = model.config
    norm = model.norm
    E = config.hidden_size
    H, K = config.num_heads, config.num_kv_heads
    D = config.head_dim
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator).to(model.device, model.dtype)

    x_BTE, change_BTE = random(3, E), random(3, E)
    gate_up_BTI = random(3, 2 * config.intermediate_size)
    gate, up = gate_up_BTI.chunk(2, dim=-1)
    plain = [x_BTE + change_BTE, norm(x_BTE + change_BTE), F.silu(gate) * up]
    fused = [*add_norm(x_BTE, change_BTE, norm), silu_times(gate_up_BTI)]
    qkv_BTX = random(3, (H + 2 * K) * D)
    keys_BKSD, values_BKSD = random(K, 9, D), random(K, 9, D)
    slots_BT = torch.arange(6, 9, device=model.device).repeat(2, 1)
    rotary = model.rope.at(100 * slots_BT)
    heads_BTXD = qkv_BTX.unflatten(2, (-1, D))
    plain += [rotary.rotate(heads_BTXD[:, :, : H + K]), heads_BTXD[:, :, H + K :]]
    q_BTHD = rotate_to_cache(qkv_BTX, (H, K), rotary, slots_BT, keys_BKSD, values_BKSD)
    fused += [torch.cat((q_BTHD, keys_BKSD[:, :, 6:].transpose(1, 2)), 2)]
    fused += [values_BKSD[:, :, 6:].transpose(1, 2)]
    errors = [((a - b).abs() / (1 + a.abs())).max() for a, b in zip(plain, fused, strict=True)]
    return float(torch.stack(errors).nan_to_num(torch.inf).max())
