"""Tables and figures of the paper, in its order, each a module with an `ITEM`."""

from tools.paper.item import Item
from tools.paper.items import (
    batches,
    bottlenecks,
    budgets,
    chunks,
    contexts,
    divergence,
    drafters,
    exactness,
    gammas,
    locality,
    offloading,
    outputs,
    selection,
    sparsity,
    tasks,
    temperatures,
    trees,
)

ITEMS: tuple[Item, ...] = (
    divergence.ITEM,
    bottlenecks.ITEM,
    sparsity.ITEM,
    selection.ITEM,
    locality.ITEM,
    tasks.ITEM,
    temperatures.ITEM,
    offloading.ITEM,
    batches.ITEM,
    contexts.ITEM,
    budgets.ITEM,
    chunks.ITEM,
    trees.ITEM,
    outputs.ITEM,
    gammas.ITEM,
    drafters.ITEM,
    exactness.ITEM,
)
