"""Tables and figures of the paper, in its order, each a module with an `ITEM`."""

from tools.paper.item import Item
from tools.paper.items import budgets, temperatures

ITEMS: tuple[Item, ...] = (temperatures.ITEM, budgets.ITEM)
