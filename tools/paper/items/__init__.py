"""Tables and figures of the paper, in its order."""

from tools.paper.item import Item
from tools.paper.items import (
    acceptance,
    attention,
    batches,
    bottlenecks,
    exactness,
    offloading,
    outputs,
    speeds,
    tasks,
    trees,
)

ITEMS: tuple[Item, ...] = (
    acceptance.FIG2A,
    bottlenecks.ITEM,
    attention.FIG3A,
    acceptance.FIG3B,
    attention.FIG3C,
    tasks.ITEM,
    speeds.TABLE2,
    offloading.ITEM,
    batches.ITEM,
    speeds.FIG5,
    acceptance.FIG6A,
    acceptance.FIG6B,
    trees.ITEM,
    outputs.ITEM,
    speeds.GAMMAS,
    speeds.DRAFTERS,
    exactness.ITEM,
)
