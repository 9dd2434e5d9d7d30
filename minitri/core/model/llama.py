"""The Llama network in PyTorch; its cache and its attention function are passed in.

The network knows neither which kind of cache it writes to nor how attention is computed. Parameters
have the names of Hugging Face's Llama, except that q, k, v and gate, up are one matmul each.
Legend: L layers, B batch, T new tokens, E hidden size, K KV heads, H query heads, D head dim, S
slots of a cache, V vocab, N guesses.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import RMSNorm

from minitri.core.config import ModelConfig
from minitri.core.model.attention import Attend, Window, attend_math
from minitri.core.model.cache import BlockKV, Cache
from minitri.core.model.execution import Execution
from minitri.core.model.linear import Linear, Table, TiedHead, TrimmedHead
from minitri.core.model.rope import Rope, Rotary

EMBEDDING_SAMPLE = 64  # embeddings by which a drafter without a table recognises its target


@dataclass(frozen=True)
class Block:
    """The input of a forward pass: new tokens of every row, (B, T) int64 on the device."""

    tokens_BT: Tensor  # token ids
    positions_BT: Tensor  # in the text, for the rotary embedding
    slots_BT: Tensor | None = None  # of the cache; None: right after each row's prefix

    @functools.cached_property
    def lengths_B(self) -> Tensor | None:
        """First slot (B,) of each row's block, so the prefix's length. None without `slots_BT`."""
        return None if self.slots_BT is None else self.slots_BT[:, 0].contiguous()


class Llama(nn.Module):
    """A Llama, or a related model that `ModelConfig` describes; a checkpoint fills its weights."""

    embedding_sample: Tensor  # some of the target's embeddings, in a drafter without a table

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        target: "Llama | None" = None,
        attend: Attend = attend_math,
    ) -> None:
        """Makes the network without weights; `target` lends a drafter its embedding table."""
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.attend = attend
        self.execution = Execution()
        V = config.vocab_size
        E = config.hidden_size
        with torch.device(device):
            if not (target or config.tie_word_embeddings):
                self.embed_tokens = Table.empty(E, V, dtype=dtype)
            self.layers = Layers(Layer(config, dtype, i) for i in range(config.num_layers))
            self.norm = make_norm(E, config, dtype)
            self.lm_head: Linear | TrimmedHead
            if config.head_size is None:
                head = TiedHead if config.tie_word_embeddings else Linear
                self.lm_head = head.empty(E, V, dtype=dtype)
            else:
                self.lm_head = TrimmedHead(E, config.head_size, V, dtype=dtype)
                sample = torch.empty(EMBEDDING_SAMPLE, E, dtype=dtype)
                self.register_buffer("embedding_sample", sample)
        self.requires_grad_(False)
        self.lent_embedding = target.embed if target else None
        D = config.head_dim
        self.rope = Rope(config.rope, D, device)
        self.window_rope = Rope(config.window_rope or config.rope, D, device)
        if config.score_scale:  # attention divides by sqrt(head_dim)
            for rope in (self.rope, self.window_rope):
                rope.scale *= math.sqrt(config.score_scale * math.sqrt(D))
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.num_bytes = sum(weight.nbytes for weight in self.parameters())

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def forward(
        self,
        block: Block,
        cache: Cache,
        mask_TT: Tensor | None = None,
        queries_LBTHD: Tensor | None = None,
        *,
        is_prompt: bool = False,
    ) -> Tensor:
        """Final hidden states (B, T, E) of a block; writes its K and V after each row's prefix:
        call `cache.advance` with the tokens to keep. `mask_TT` is True where a token sees another;
        None: causal. `queries_LBTHD` gets rotated queries of the block's last tokens. `is_prompt`
        computes short blocks like long ones: K and V have the same bits, however a text is cut."""
        rotary = self.rope.at(block.positions_BT)
        shared = Pass(block, rotary, cache, self.attend, mask_TT, queries_LBTHD, is_prompt)
        return self.norm(self.layers.forward(self.embed(block.tokens_BT), self.windowed(shared)))

    def windowed(self, shared: "Pass") -> "Pass":
        """`shared` with `in_windows` set for layers with a sliding window, if the model has any."""
        if not (size := self.config.window):
            return shared
        block, reach = shared.block, shared.cache.capacity
        if block.slots_BT is None:  # else a graph may hold the pass: no shape follows lengths
            reach = max(shared.cache.next_positions)
        positions_BT = block.positions_BT
        window = Window(positions_BT, shared.mask_TT, size, reach, shared.cache.capacity)
        block = replace(block, slots_BT=window.slots_BN[:, -positions_BT.shape[1] :])
        rotary = self.window_rope.at(positions_BT)
        inside = replace(shared, block=block, rotary=rotary, attend=window.attend)
        return replace(shared, in_windows=inside)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings (..., E) of token ids (...)."""
        if self.lent_embedding:
            return self.lent_embedding(tokens).to(self.dtype)
        table = self.lm_head if isinstance(self.lm_head, TiedHead) else self.embed_tokens
        return table.rows(tokens) * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits by the LM head, float32: hidden states (..., E) to (..., V)."""
        logits = self.lm_head(hidden).float()
        divisor = self.config.logit_divisor
        return logits if divisor == 1 else logits / divisor


def sample_of_vocabulary(config: ModelConfig) -> Tensor:
    """Evenly spread token ids (EMBEDDING_SAMPLE,); their embeddings identify a drafter's target."""
    return torch.linspace(0, config.vocab_size - 1, EMBEDDING_SAMPLE).long()


@dataclass(frozen=True)
class Pass:
    """The arguments that all layers of one forward pass share."""

    block: Block
    rotary: Rotary  # cosines and sines of the block's positions
    cache: Cache  # in which each layer writes and reads K and V
    attend: Attend
    mask_TT: Tensor | None  # True where a token (row) sees another; None: causal
    queries_LBTHD: Tensor | None  # to be filled with rotated queries
    is_prompt: bool = False  # compute a short block like a long one
    layers: list[int] | None = None  # numbers of the layers to compute; None: all
    in_windows: "Pass | None" = None  # what layers with a sliding window use instead


class Layers(nn.ModuleList):
    """The transformer blocks, applied in order."""

    reads_prompts = False  # whether CPU kernels compute prompts, too: in few bits, without AMX

    def forward(self, x_BTE: Tensor, shared: Pass) -> Tensor:
        # `forward` saves the microseconds that a module's `__call__` spends on hooks.
        for number in shared.layers or range(len(self)):
            x_BTE = self[number].forward(x_BTE, number, shared)
        return x_BTE


class Layer(nn.Module):
    """Transformer block with norms before attention and MLP, after both, or before and after."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, number: int) -> None:
        super().__init__()
        norm: Any = functools.partial(make_norm, config.hidden_size, config, dtype)
        before = norm if config.norms_before else nn.Identity
        after = norm if config.norms_after else nn.Identity
        self.residual_scale = config.residual_scale
        self.input_layernorm = before()
        self.self_attn = Attention(config, dtype, number)
        self.attention_output_norm = after()
        self.post_attention_layernorm = before()
        self.mlp = MLP(config, dtype)
        self.mlp_output_norm = after()

    def forward(self, x_BTE: Tensor, layer: int, shared: Pass) -> Tensor:
        mixed_BTE = self.self_attn.forward(self.input_layernorm(x_BTE), layer, shared)
        change_BTE = self.attention_output_norm(mixed_BTE)
        x_BTE = torch.add(x_BTE, change_BTE, alpha=self.residual_scale)
        change_BTE = self.mlp_output_norm(self.mlp(self.post_attention_layernorm(x_BTE)))
        return torch.add(x_BTE, change_BTE, alpha=self.residual_scale)


class Attention(nn.Module):
    """Grouped-query attention with a fused q, k, v projection."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, number: int) -> None:
        super().__init__()
        E = config.hidden_size
        D = config.head_dim
        self.rotates = number not in config.unrotated_layers
        self.has_window = number in config.sliding_layers
        self.heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = D
        bias = config.attention_bias
        self.qkv_proj = Linear.empty(E, sum(self.heads) * D, bias=bias, dtype=dtype)
        has_bias = bias if config.output_bias is None else config.output_bias
        self.o_proj = Linear.empty(self.heads[0] * D, E, bias=has_bias, dtype=dtype)
        self.q_norm = self.k_norm = None
        if config.head_norm or config.joint_norm:
            widths = [D * num if config.joint_norm else D for num in self.heads[:2]]
            self.q_norm, self.k_norm = (make_norm(width, config, dtype) for width in widths)

    def forward(self, x_BTE: Tensor, layer: int, shared: Pass) -> Tensor:
        if self.has_window and shared.in_windows:
            shared = shared.in_windows
        heads = self.qkv_proj(x_BTE).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2 K, D)
        raw_q_BTHD, raw_BTKD, v_BTKD = heads.split(self.heads, dim=2)
        if self.q_norm and self.k_norm:
            raw_BTKD = norm_heads(self.k_norm, raw_BTKD)
            heads = torch.cat((norm_heads(self.q_norm, raw_q_BTHD), raw_BTKD), 2)
        rotated = heads[:, :, : sum(self.heads[:2])]
        if self.rotates:
            rotated = shared.rotary.rotate(rotated)
        q_BTHD, k_BTKD = rotated.split(self.heads[:2], dim=2)
        # Before `update`, in which an offloaded cache selects chunks by these queries.
        if shared.queries_LBTHD is not None:
            latest_BTHD = q_BTHD[:, -shared.queries_LBTHD.shape[2] :]
            shared.queries_LBTHD[layer, :, : latest_BTHD.shape[1]] = latest_BTHD
        block = BlockKV(raw_BTKD, k_BTKD, v_BTKD, shared.block.slots_BT)
        keys_BKSD, values_BKSD = shared.cache.update(layer, block)
        lengths = (shared.cache.lengths, shared.mask_TT, shared.block.lengths_B)
        return self.o_proj(shared.attend(q_BTHD, keys_BKSD, values_BKSD, *lengths).flatten(2))


def make_norm(width: int, config: ModelConfig, dtype: torch.dtype) -> RMSNorm:
    """RMSNorm over `width` numbers, unfilled: `WideNorm` if `config.wide_norms`, else PyTorch's."""
    kind, dtype = (WideNorm, torch.float32) if config.wide_norms else (RMSNorm, dtype)
    return kind(width, config.rms_norm_eps, dtype=dtype)


class WideNorm(RMSNorm):
    """RMSNorm in float32, with float32 weights; only the result is rounded to the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


def norm_heads(norm: RMSNorm, x_BTXD: Tensor) -> Tensor:
    """Normalizes x (B, T, heads, D): each head by itself if `norm` has D weights; if it has
    heads * D, all heads of a token as one vector."""
    return norm(x_BTXD.flatten(2).unflatten(2, (-1, len(norm.weight)))).view(x_BTXD.shape)


class MLP(nn.Module):
    """SwiGLU, or GeGLU, with a fused gate and up projection."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gate_up_proj = Linear.empty(config.hidden_size, 2 * inner, dtype=dtype)
        self.down_proj = Linear.empty(inner, config.hidden_size, dtype=dtype)
        self.gate = functools.partial(gate, activation=tanh_gelu) if config.geglu else gate

    def forward(self, x_BTE: Tensor) -> Tensor:
        return self.down_proj(self.gate(self.gate_up_proj(x_BTE)))


tanh_gelu = functools.partial(F.gelu, approximate="tanh")


def gate(gate_up: Tensor, activation: Any = F.silu) -> Tensor:
    """(..., 2 I) to (..., I): the activation of the first half, times the second half."""
    gates, ups = gate_up.chunk(2, dim=-1)
    return activation(gates) * ups
