"""Tables and figures of the paper, in its order, each a module with an `ITEM`."""

from tools.paper.item import Item
from tools.paper.items import (
    batches,
    budgets,
    chunks,
    contexts,
    drafters,
    exactness,
    gammas,
    offloading,
    outputs,
    temperatures,
    trees,
)

ITEMS: tuple[Item, ...] = (
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
