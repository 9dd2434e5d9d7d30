"""Tables and figures of the paper, in its order, each a module with an `ITEM`."""

from tools.paper.item import Item
from tools.paper.items import (
    bottlenecks,
    budgets,
    divergence,
    locality,
    selection,
    sparsity,
    tasks,
    temperatures,
)

ITEMS: tuple[Item, ...] = (
    divergence.ITEM,
    bottlenecks.ITEM,
    sparsity.ITEM,
    selection.ITEM,
    locality.ITEM,
    tasks.ITEM,
    temperatures.ITEM,
    budgets.ITEM,
)
