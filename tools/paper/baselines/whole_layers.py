"""A model whose first layers attend to the whole text, whatever small cache the others have.

The paper's Table 1 and Figure 3b are measured so: attention is sparse but in the first two layers.
The engine has no such thing, which would make its small cache as long as the text, if thin.
"""

from dataclasses import replace

from torch import Tensor

from minitri.caches.full import FullCache
from minitri.model.llama import Layers, Llama, Pass
from minitri.model.replace import copy_with


class FirstLayersWhole(Layers):
    """Transformer blocks, the first of which use a full cache of their own."""

    def __init__(self, plain: Layers, whole: FullCache) -> None:
        super().__init__(plain)
        self.whole = whole

    def forward(self, x_BTE: Tensor, shared: Pass) -> Tensor:
        start = int(shared.block.positions_BT[0, 0])
        self.whole.hold(0, start, start)
        by_lengths = replace(shared.block, slots_BT=None)  # slots are those of the small cache
        own = replace(shared, cache=self.whole, block=by_lengths)
        for number, layer in enumerate(self):
            is_whole = number < len(self.whole.keys)
            x_BTE = layer.forward(x_BTE, number, own if is_whole else shared)
        return x_BTE


def first_layers_whole(model: Llama, full: FullCache, count: int) -> Llama:
    """The model with a copy of the first `count` layers of a full cache of one row."""
    whole = FullCache(full.keys[:count].clone(), full.values[:count].clone())
    return copy_with(model, {type(model.layers): lambda layers: FirstLayersWhole(layers, whole)})
