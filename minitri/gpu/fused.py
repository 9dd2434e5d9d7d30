"""The network on a GPU with fused kernels: what `fuse` makes of a model's modules.

A pass of decoding is made of launches, each of which costs a microsecond or two beside the few that
it works. So what stands between the matrices is one kernel each (`kernels/fused.py`): RoPE with the
writing of K and V, the residual addition with the norm behind it, and SiLU with its product. The
plain modules are the oracle. Blocks without slots on the device, those of a prefill, and caches
that are more than tensors take RoPE and writing as they are.

Legend: L layers, B batch, T tokens, S slots, E hidden size, H query heads, K KV heads, D head dim,
X = (H + 2 K) D.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitri.caches.full import FullCache
from minitri.caches.retrieval import RetrievalCache
from minitri.caches.streaming import StreamingCache
from minitri.gpu.attention import tolerance
from minitri.gpu.kernels import are_usable
from minitri.model.config import ModelConfig
from minitri.model.llama import MLP, Attention, Layer, Layers, Llama, Pass, RMSNorm
from minitri.model.rope import Rope

WRITABLE = (FullCache, RetrievalCache, StreamingCache)
"""Caches that are nothing but tensors (L, B, K, S, D), into which a kernel may write."""


class FusedAttention(Attention):
    """Attention whose queries are rotated and whose K and V are written by one kernel."""

    def mix(self, qkv_BTX: Tensor, layer: int, shared: Pass) -> Tensor:
        cache, queries, slots_BT = shared.cache, shared.queries_LBTHD, shared.slots_BT
        if slots_BT is None or type(cache) not in WRITABLE:
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


class FusedNorm(RMSNorm):
    """A norm that may add what is new to the residual stream first."""

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(x, None)[1]

    def behind(self, x_BTE: Tensor, change_BTE: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + change, and its norm."""
        from minitri.gpu.kernels.fused import add_norm

        return add_norm(x_BTE, change_BTE, self.weight, self.eps)


class FusedLayers(Layers):
    """All transformer blocks; each adds what the one before it has left to add."""

    def forward(self, x_BTE: Tensor, shared: Pass) -> Tensor:
        change_BTE = None
        for number, layer in enumerate(self):
            assert isinstance(layer, Layer)
            before, between = layer.input_layernorm, layer.post_attention_layernorm
            assert isinstance(before, FusedNorm)
            assert isinstance(between, FusedNorm)
            x_BTE, normed_BTE = before.behind(x_BTE, change_BTE)
            mixed_BTE = layer.self_attn.forward(normed_BTE, number, shared)
            x_BTE, normed_BTE = between.behind(x_BTE, mixed_BTE)
            change_BTE = layer.mlp.forward(normed_BTE)
        return x_BTE if change_BTE is None else x_BTE + change_BTE


FUSED: dict[type[nn.Module], type[nn.Module]] = {
    Attention: FusedAttention, MLP: FusedMLP, RMSNorm: FusedNorm, Layers: FusedLayers,
}  # fmt: skip


def fuse(model: Llama) -> Llama:
    """Has a model's modules compute by fused kernels; they keep all that they hold."""
    for module in model.modules():
        module.__class__ = FUSED.get(type(module), type(module))
    return model


def fuse_if_possible(model: Llama) -> None:
    """The same on a GPU where the kernels work; elsewhere the model stays as it is."""
    device, dtype, config = model.device, model.dtype, model.config
    if device.type == "cuda" and are_usable(
        f"fused kernels on {device}", lambda: largest_error(device, dtype, config), tolerance(dtype)
    ):
        fuse(model)


@torch.no_grad()
def largest_error(device: torch.device, dtype: torch.dtype, config: ModelConfig) -> float:
    """Distance, relative beside numbers above 1, from plain operations on a random block."""
    from minitri.gpu.kernels.fused import add_norm, silu_times

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, 3, *shape, generator=generator).to(device, dtype)

    E, eps, gate_up = config.hidden_size, config.rms_norm_eps, draw(2 * config.intermediate_size)
    x_BTE, change_BTE, weight_E = draw(E), draw(E), draw(E)[0, 0]
    gate, up = gate_up.chunk(2, dim=-1)
    total_BTE = x_BTE + change_BTE
    normed, norm = (F.rms_norm(x, (E,), weight_E, eps) for x in (x_BTE, total_BTE))
    pairs = [(F.silu(gate) * up, silu_times(gate_up))]
    pairs += zip((x_BTE, normed), add_norm(x_BTE, None, weight_E, eps), strict=True)
    pairs += zip((total_BTE, norm), add_norm(x_BTE, change_BTE, weight_E, eps), strict=True)
    qkv_BTX = draw((config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    pairs += zip(
        *(mix_alone(kind, qkv_BTX, config) for kind in (Attention, FusedAttention)), strict=True
    )
    errors = [((a - b).abs() / (1 + a.abs())).double().max() for a, b in pairs]
    return float(torch.stack(errors).nan_to_num(torch.inf).max())


def mix_alone(kind: type[Attention], qkv_BTX: Tensor, config: ModelConfig) -> list[Tensor]:
    """Queries, K, V and latest queries of a block, by a kind of attention."""
    (B, T, _), K, D, device = qkv_BTX.shape, config.num_kv_heads, config.head_dim, qkv_BTX.device
    with torch.device("meta"):
        attention = Attention(config, qkv_BTX.dtype)
    attention.__class__ = kind
    slots_BT = torch.arange(B * T, device=device).view(B, T) + 7
    keys, values = qkv_BTX.new_zeros(2, 1, B, K, 64, D)
    cache = FullCache(keys, values, [0] * B)
    queries_LBTHD = qkv_BTX.new_zeros(1, B, T - 1, config.num_heads, D)
    rotary = Rope(config.rope, D, device).at(slots_BT * 100)
    shared = Pass(rotary, cache, None, slots_BT, None, queries_LBTHD, lambda q, *_: q)
    return [attention.mix(qkv_BTX, 0, shared), keys, values, queries_LBTHD]
