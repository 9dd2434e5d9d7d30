"""Shapes of trees of guesses: which node follows which.

Node 0 is the root, the last committed token of the text; other nodes are guesses, ordered by depth,
siblings in the order of their tests. `sequences` and `sequoia` (arXiv 2402.12374) make the trees
of TriForce, section 5.3.
Legend: N nodes with the root, T nodes of a pass.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from heapq import heappop, heappush

import torch
from torch import Tensor

from minitri.core.decoding.autotuner import FIRST_RATES
from minitri.core.settings import StepPlan, parse_tree

MAX_CHILDREN = 8  # most children of a node in a Sequoia tree
YOUNGER_RATE = 0.3
"""Assumed acceptance rate of a node that is tested after a sibling was rejected."""


@dataclass(frozen=True)
class TreeShape:
    """The shape of a tree of guesses: `parents[i]` is node i's parent, -1 for node 0, the root."""

    parents: tuple[int, ...]

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parents)

    @cached_property
    def children(self) -> list[list[int]]:
        """The children of every node, in the order in which they are tested."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            children[parent].append(node)
        return children

    @cached_property
    def depths(self) -> list[int]:
        """Depth of each node: number of tokens from the root to the node."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    @cached_property
    def sizes(self) -> list[int]:
        """Number of nodes at each depth."""
        return [self.depths.count(depth) for depth in range(self.depths[-1] + 1)]

    @cached_property
    def mask_TT(self) -> Tensor:
        """Boolean attention mask (T, T): a node sees itself and its ancestors."""
        mask_TT = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            mask_TT[node] |= mask_TT[parent]
        return mask_TT


@cache
def shape_of(plan: StepPlan) -> TreeShape:
    """The shape of `plan.tree`: "4x3" is 4 sequences of 3 guesses, "16" the best tree of 16."""
    width, depth = parse_tree(plan.tree)
    if depth:
        return sequences(width, depth)
    rates = [FIRST_RATES[plan.proposers[0]]]
    rejected = 1 - rates[0]  # chance that all earlier siblings are rejected
    for _ in range(MAX_CHILDREN - 1):
        rates.append(rejected * YOUNGER_RATE)
        rejected *= 1 - YOUNGER_RATE
    return sequoia(rates, width, plan.gamma1 or plan.gamma2)


def sequences(width: int, depth: int) -> TreeShape:
    """A tree of `width` sequences of `depth` guesses, whose first tokens differ."""
    return TreeShape((-1, *[0] * width, *range(1, width * (depth - 1) + 1)))


def sequoia(rates: list[float], num_nodes: int, max_depth: int) -> TreeShape:
    """The tree of at most `num_nodes` guesses and `max_depth` with most expected tokens a round.
    `rates[r]`, the acceptance rate of r-th children, must not rise with r, so that the nodes with
    the highest chance of acceptance make a tree."""

    def by_worth(*path: int) -> tuple[float, int, tuple[int, ...]]:
        return -math.prod(rates[rank] for rank in path), len(path), path

    taken = list[tuple[int, ...]]()  # nodes as paths: at each depth the rank among its siblings
    waiting = [by_worth(0)]
    while waiting and len(taken) < num_nodes:
        _, depth, path = heappop(waiting)
        taken.append(path)
        *above, rank = path
        if depth < max_depth:
            heappush(waiting, by_worth(*path, 0))
        if rank + 1 < len(rates):
            heappush(waiting, by_worth(*above, rank + 1))
    paths = [(), *sorted(taken, key=lambda path: (len(path), path))]
    return TreeShape((-1, *(paths.index(path[:-1]) for path in paths[1:])))
