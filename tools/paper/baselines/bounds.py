"""Bounds for a small cache: layers that see the whole text, and queries that each choose
the best tokens of it.

The paper's Table 1 and Figure 3b are measured with the first two layers whole, as attention is
sparse but there; and its Top-K is a bound, which reads the whole text to choose anew for every
query. The engine does neither: both would cost what the small cache saves.

Legend: L layers, B batch, T tokens, E hidden size, H query heads, K KV heads, D head dim, S slots,
R = H / K times T.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from minitri.core.caches.full import FullCache
from minitri.core.model.attention import block_mask
from minitri.core.model.llama import Layers, Llama, Pass
from minitri.devices.replace import copy_with


class UnlikeLayers(Layers):
    """Transformer blocks, of which some use another cache or attention than the pass says."""

    def __init__(self, plain: Layers, change: Callable[[int, Pass], Pass]) -> None:
        super().__init__(plain)
        self.change = change

    def forward(self, x_BTE: Tensor, shared: Pass) -> Tensor:
        for number, layer in enumerate(self):
            x_BTE = layer.forward(x_BTE, number, self.change(number, shared))
        return x_BTE


def changed(model: Llama, change: Callable[[int, Pass], Pass]) -> Llama:
    """The model with what `change` makes of a pass for each layer."""
    return copy_with(model, {type(model.layers): lambda layers: UnlikeLayers(layers, change)})


def first_layers_whole(model: Llama, full: FullCache, count: int) -> Llama:
    """The model with a copy of the first `count` layers of a full cache of one row, which these
    attend to, whatever small cache the others have."""
    whole = FullCache(full.keys[:count].clone(), full.values[:count].clone())

    def change(number: int, shared: Pass) -> Pass:
        if number >= count:
            return shared
        start = int(shared.block.positions_BT[0, 0])
        whole.hold(0, start, start)
        by_lengths = replace(shared.block, slots_BT=None)  # slots are those of the small cache
        return replace(shared, cache=whole, block=by_lengths)

    return changed(model, change)


def top_tokens(model: Llama, budget: int, first: int) -> Llama:
    """The model whose queries, from the layer `first` on, attend to their own best tokens alone."""
    attend = TopAttention(budget)
    return changed(
        model, lambda n, shared: replace(shared, attend=attend) if n >= first else shared
    )


@dataclass(frozen=True)
class TopAttention:
    """Attention of one row to the tokens with the highest scores, by query and head."""

    budget: int

    def __call__(
        self,
        q_BTHD: Tensor,
        keys_BKSD: Tensor,
        values_BKSD: Tensor,
        prefix_lengths: list[int],
        mask_TT: Tensor | None = None,
        lengths_B: Tensor | None = None,  # noqa: ARG002 (part of the contract)
    ) -> Tensor:
        T, _, D = q_BTHD.shape[1:]
        end = prefix_lengths[0] + T
        q_BHTD = q_BTHD.transpose(1, 2) / math.sqrt(D)
        q_BKRD = q_BHTD.unflatten(1, (keys_BKSD.shape[1], -1)).flatten(2, 3)
        scores_BKRS = (q_BKRD @ keys_BKSD[:, :, :end].transpose(2, 3)).float()
        future_TT = ~block_mask(T, mask_TT, q_BTHD.device)
        scores_BKRS.unflatten(2, (-1, T))[..., -T:].masked_fill_(future_TT, -math.inf)
        least_BKR1 = scores_BKRS.topk(min(self.budget, end)).values[..., -1:]
        probs_BKRS = scores_BKRS.masked_fill_(scores_BKRS < least_BKR1, -math.inf).softmax(3)
        out_BKRD = probs_BKRS.to(values_BKSD.dtype) @ values_BKSD[:, :, :end]
        return out_BKRD.unflatten(2, (-1, T)).flatten(1, 2).transpose(1, 2)
