"""Shapes of trees of guesses: which node follows which.

Node 0 is the root, the last certain token; the others are guesses, ordered by depth, siblings side
by side in the order in which they are drawn and tested. A node's number is its place in the block.

Two kinds (TriForce, section 5.3): independent `sequences` of guesses, and `sequoia`, the tree of a
given size that is expected to lead furthest (arXiv 2402.12374).

Legend: N nodes with the root, T nodes of a pass.
"""

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minitri.core.decoding.autotuner import FIRST_RATES
from minitri.core.settings import StepPlan, parse_tree

MAX_CHILDREN = 8  # of a node of a Sequoia tree
YOUNGER_RATE = 0.3
"""How often a child is accepted that is tested after its elder siblings were rejected."""


@dataclass(frozen=True)
class TreeShape:
    """The parent of every node; -1 for the root."""

    parents: tuple[int, ...]

    def __len__(self) -> int:
        """Nodes, the root included."""
        return len(self.parents)

    @functools.cached_property
    def children(self) -> list[list[int]]:
        """The children of every node, in the order in which they are tested."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            children[parent].append(node)
        return children

    @functools.cached_property
    def depths(self) -> list[int]:
        """How many tokens after the root each node stands."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return depths

    @functools.cached_property
    def sizes(self) -> list[int]:
        """How many nodes stand at each depth, down to the deepest."""
        return [self.depths.count(depth) for depth in range(self.depths[-1] + 1)]

    @functools.cached_property
    def rule_TT(self) -> Tensor:
        """Which nodes each node sees: itself and its ancestors; boolean, for attention."""
        rule_TT = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            rule_TT[node] |= rule_TT[parent]
        return rule_TT


@functools.cache
def shape_of(plan: StepPlan) -> TreeShape:
    """The tree that a plan asks for: independent sequences, or the best one of its size."""
    width, depth = parse_tree(plan.tree)
    if depth:
        return sequences(width, depth)
    first = FIRST_RATES["draft" if plan.uses_drafter else "retrieval"]
    rates = [first]
    rejected = 1 - first  # the elder siblings
    for _ in range(MAX_CHILDREN - 1):
        rates.append(rejected * YOUNGER_RATE)
        rejected *= 1 - YOUNGER_RATE
    return sequoia(rates, width, plan.gamma1 or plan.gamma2)


def sequences(width: int, depth: int) -> TreeShape:
    """`width` sequences of `depth` guesses, which differ from their first token on."""
    return TreeShape((-1, *[0] * width, *range(1, width * (depth - 1) + 1)))


def sequoia(rates: Sequence[float], num_nodes: int, max_depth: int) -> TreeShape:
    """The tree of at most `num_nodes` guesses with the most expected tokens per round.

    `rates[r]`, which must not rise, is how often the r-th child of an accepted node is. So no node
    is worth more than its parent or the sibling before it, and those worth most are the optimum.
    """

    def by_worth(*path: int) -> tuple[float, int, tuple[int, ...]]:
        return -math.prod(rates[rank] for rank in path), len(path), path

    taken = list[tuple[int, ...]]()  # the nodes by the ranks of their ancestors and their own
    waiting = [by_worth(0)]
    while waiting and len(taken) < num_nodes:
        _, depth, path = heapq.heappop(waiting)
        taken.append(path)
        *above, rank = path
        if depth < max_depth:
            heapq.heappush(waiting, by_worth(*path, 0))
        if rank + 1 < len(rates):
            heapq.heappush(waiting, by_worth(*above, rank + 1))
    paths = [(), *sorted(taken, key=lambda path: (len(path), path))]
    return TreeShape((-1, *(paths.index(path[:-1]) for path in paths[1:])))
