"""The network on a GPU with fused kernels: what `fuse` makes of a model's modules.

A pass of decoding is made of launches, each of which costs a microsecond or two beside the few that
it works. So what stands between the matrices is one kernel each (`kernels/fused.py`): RoPE with the
writing of K and V, the residual addition with the norm behind it, and SiLU with its product. The
plain modules are the oracle. Blocks without slots on the device (a prefill's), caches that are more
than tensors (host memory's) and norms of heads leave RoPE and writing plain.

Legend: L layers, B batch, T tokens, S slots, E hidden size, H query heads, K KV heads, D head dim,
X = (H + 2 K) D.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitri.caches.full import FullCache
from minitri.caches.retrieval import RetrievalCache
from minitri.caches.streaming import StreamingCache
from minitri.gpu.backend_choice import tolerance
from minitri.gpu.kernels import are_usable
from minitri.model.llama import MLP, Attention, Layer, Layers, Llama, Pass

WRITABLE = (FullCache, RetrievalCache, StreamingCache)
"""Caches that are nothing but tensors (L, B, K, S, D), into which a kernel may write."""


class FusedAttention(Attention):
    """Attention whose queries are rotated and whose K and V are written by one kernel."""

    def mix(self, qkv_BTX: Tensor, layer: int, shared: Pass) -> Tensor:
        cache, queries, slots_BT = shared.cache, shared.queries_LBTHD, shared.slots_BT
        if slots_BT is None or self.q_norm is not None or type(cache) not in WRITABLE:
            return super().mix(qkv_BTX, layer, shared)
        from minitri.gpu.kernels.fused import rotate_to_cache

        assert isinstance(cache, WRITABLE)
        keys_BKSD, values_BKSD = cache.keys[layer], cache.values[layer]
        T, S, lengths = qkv_BTX.shape[1], keys_BKSD.shape[2], cache.lengths
        if max(lengths) + T > S:
            raise IndexError(f"a block of {T} behind {max(lengths)} of {S} tokens")
        q_BTHD = rotate_to_cache(
            qkv_BTX, self.heads[:2], shared.rotary, slots_BT, keys_BKSD, values_BKSD,
            cache.raw_keys[layer] if isinstance(cache, StreamingCache) else None,
            queries[layer] if queries is not None else None,
        )  # fmt: skip
        rule_TT, lengths_B = shared.rule_TT, shared.lengths_B
        return shared.attend(q_BTHD, keys_BKSD, values_BKSD, lengths, rule_TT, lengths_B).flatten(2)


class FusedMLP(MLP):
    """SwiGLU with one kernel between its matrices."""

    def forward(self, x_BTE: Tensor) -> Tensor:
        from minitri.gpu.kernels.fused import silu_times

        return self.down_proj(silu_times(self.gate_up_proj(x_BTE)))


class FusedLayers(Layers):
    """All transformer blocks; each adds what the one before it has left to add."""

    def forward(self, x_BTE: Tensor, shared: Pass) -> Tensor:
        from minitri.gpu.kernels.fused import add_norm

        change_BTE = torch.zeros_like(x_BTE)
        for number, layer in enumerate(self):
            assert isinstance(layer, Layer)
            x_BTE, normed_BTE = add_norm(x_BTE, change_BTE, layer.input_layernorm)
            mixed_BTE = layer.self_attn.forward(normed_BTE, number, shared)
            x_BTE, normed_BTE = add_norm(x_BTE, mixed_BTE, layer.post_attention_layernorm)
            change_BTE = layer.mlp.forward(normed_BTE)
        return x_BTE + change_BTE


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    Attention: FusedAttention, MLP: FusedMLP, Layers: FusedLayers
}  # fmt: skip


def fuse(model: Llama) -> Llama:
    """Has a model's modules compute by fused kernels; they keep all that they hold."""
    for module in model.modules():
        module.__class__ = FUSED.get(type(module), type(module))
    return model


def fuse_if_possible(model: Llama) -> None:
    """The same on a GPU where the kernels work; elsewhere the model stays as it is."""
    name, limit = f"fused kernels on {model.device}", tolerance(model.dtype)
    if model.device.type == "cuda" and are_usable(name, lambda: largest_error(model), limit):
        fuse(model)


@torch.no_grad()
def largest_error(model: Llama) -> float:
    """Distance from plain operations on a random block, relative beside numbers above 1."""
    from minitri.gpu.kernels.fused import add_norm, rotate_to_cache, silu_times

    config, norm, generator = model.config, model.norm, torch.Generator().manual_seed(0)
    E, H, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    x_BTE, change_BTE, gate_up_BTI, qkv_BTX, slots_BKSD = (
        torch.randn(2, 3, *shape, generator=generator).to(model.device, model.dtype)
        for shape in ((E,), (E,), (2 * config.intermediate_size,), ((H + 2 * K) * D,), (K, 9, D))
    )
    gate, up = gate_up_BTI.chunk(2, dim=-1)
    plain = [x_BTE + change_BTE, norm(x_BTE + change_BTE), F.silu(gate) * up]
    fused = [*add_norm(x_BTE, change_BTE, norm), silu_times(gate_up_BTI)]
    slots_BT = torch.arange(6, 9, device=model.device).repeat(2, 1)
    rotary, heads = model.rope.at(100 * slots_BT), qkv_BTX.unflatten(2, (-1, D))
    keys_BKSD, values_BKSD = slots_BKSD[:, 0], slots_BKSD[:, 1]
    plain += [rotary.rotate(heads[:, :, : H + K]), heads[:, :, H + K :]]
    q_BTHD = rotate_to_cache(
        qkv_BTX, (H, K), rotary, slots_BT, keys_BKSD, values_BKSD, None, None
    )  # fmt: skip
    fused += [torch.cat((q_BTHD, keys_BKSD[:, :, 6:].transpose(1, 2)), 2)]
    fused += [values_BKSD[:, :, 6:].transpose(1, 2)]
    errors = [((a - b).abs() / (1 + a.abs())).max() for a, b in zip(plain, fused, strict=True)]
    return float(torch.stack(errors).nan_to_num(torch.inf).max())
