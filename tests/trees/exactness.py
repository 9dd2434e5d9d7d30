"""Enumeration of cascades that guess trees: the harness of `tests/core/exactness.py` with trees."""

import torch

from minitri.core.decoding.text_filters import paths_of
from minitri.core.settings import StepPlan
from minitri.trees.tree_level import MISSING, TreeLevel, draw_children, walk
from minitri.trees.tree_shape import TreeShape
from tests.core import exactness
from tests.core.exactness import EDGE, ScriptedSource, TableRunner, cells, exactly


def draws(probs_V, num_children, reached=1.0, numbers=()):
    """Every way to draw different tokens: its probability, and numbers that lead there."""
    if len(numbers) == num_children:
        return [(reached, list(numbers))]
    if float(probs_V.sum()) == 0:
        return draws(probs_V, num_children, reached, (*numbers, 0.5))
    shares, found = probs_V / probs_V.sum(), []
    tokens = shares.nonzero().flatten().tolist()
    for token, (share, number) in zip(tokens, cells(shares), strict=True):
        left_V = probs_V.clone()
        left_V[token] = 0
        found += draws(left_V, num_children, reached * share, (*numbers, number))
    return found


def walks(shape, tokens, q_NV, p_NV, node=0, reached=1.0, numbers=None):
    """Every way through a tree, by the textbook: its probability, and a number for the token after
    it, then one for the test of each node."""
    found, rest_V = [], p_NV[node]
    numbers = numbers or [0.5] * len(shape)
    if shape.children[node]:
        q_V = q_NV[node].clone()
    for child in shape.children[node]:
        token = tokens[child - 1]
        if token == MISSING:
            break
        own_V = q_V / q_V.sum()
        accept = min(1.0, float(rest_V[token] / own_V[token]))
        if accept > 0:
            passed = [*numbers]
            passed[child] = accept * (1 - EDGE)
            found += walks(shape, tokens, q_NV, p_NV, child, reached * accept, passed)
        if accept == 1:
            return found
        numbers[child] = accept + (1 - accept) * EDGE
        reached *= 1 - accept
        left_V = (rest_V - own_V).clamp_min(0)
        rest_V = left_V / left_V.sum()
        q_V[token] = 0
    for share, number in cells(rest_V):
        found.append((reached * share, [number, *numbers[1:]]))
    return found


class TreeRunner(TableRunner):
    def read_tree(self, sequences, active, blocks, shape, first):
        T = len(blocks[0])
        probs_BTV = torch.zeros(len(blocks), T, self.table.V, dtype=torch.float64)
        self.blocks = blocks
        above = []
        for b, block in enumerate(blocks):
            for i in range(T):
                seen = shape.mask_TT[first + i, first : first + T].nonzero().flatten().tolist()
                above += [seen[first == 0 :]] if b == 0 else []
                context = (*self.memory[b], *(block[j] for j in seen))
                probs_BTV[b, i] = self.table.row(context)
        paths = paths_of(self.text_filters, sequences, active, blocks, above)
        return self.filtered(probs_BTV, paths)

    def keep_paths(self, paths, active):
        for b, path in enumerate(paths):
            if active[b]:
                self.memory[b] += [self.blocks[b][node] for node in (0, *path)]


class ScriptedTrees(ScriptedSource):
    """A scripted random source for trees."""

    def draw(self, b, output, place, num_children, position):
        probs_V = output.probs_BNV[b, place]
        numbers = self.next_numbers(b, lambda: draws(probs_V, num_children))
        return draw_children(probs_V, exactly(numbers or [0.5] * num_children))

    def walk(self, proposal, b, probs_NV, start):
        own = proposal.shape, proposal.tokens[b], proposal.probs_BNV[b]
        numbers = self.next_numbers(b, lambda: walks(*own, probs_NV))
        return walk(proposal, b, probs_NV, exactly(numbers or [0.5] * len(proposal.shape)))


def largest_error(V, gamma1, gamma2, *, shape: TreeShape, plans=None, **settings) -> float:
    """The error of `exactness.largest_error` if the lowest stage guesses trees of this shape."""

    def make_level(name, meter, table, text_filters, source) -> TreeLevel:
        runner = TreeRunner(table, len(text_filters), text_filters)
        level = TreeLevel(name, meter, runner, source)
        for part in ("read_tree", "keep_paths"):
            setattr(level, part, getattr(runner, part))
        level.draw, level.walk = source.draw, source.walk
        level.shape = lambda: shape if meter.tuner.plan.tree else None
        return level

    plans = plans or [StepPlan("all stages", gamma1, gamma2, "1")]
    how = {"make_level": make_level, "make_source": ScriptedTrees, "plans": plans}
    return exactness.largest_error(V, gamma1, gamma2, **how, **settings)
