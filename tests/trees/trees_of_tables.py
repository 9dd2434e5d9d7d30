"""The harness of the exactness tests (`tests/exactness.py`) for trees."""

import contextlib
import itertools

import torch

from minitri.decoding.cascade import Cascade
from minitri.decoding.level import Output
from minitri.decoding.meter import Meter
from minitri.settings import StepPlan
from minitri.stats import LevelStats, Stats
from minitri.trees.shape import TreeShape
from minitri.trees.tree_level import TreeLevel
from minitri.trees.tuner import TreeTuner
from minitri.trees.walk import MISSING, TreeProposal, draw_children, walk
from tests.exactness import EDGE, PROMPT, ScriptedSource, Table, TableRunner, cells, running


class TreeTableRunner(TableRunner):
    """Distributions for the nodes of trees after the tokens that have been read: at first, as
    after a prefill, all but the last one."""

    def __init__(self, table: Table, batch_size: int) -> None:
        super().__init__(table, batch_size)
        self.memory = [PROMPT[:-1] for _ in range(batch_size)]

    def next_probs_of_tree(self, blocks, shape, first):
        T = len(blocks[0])
        probs_BTV = torch.zeros(len(blocks), T, self.table.V, dtype=torch.float64)
        self.blocks = blocks
        for b, block in enumerate(blocks):
            for i in range(T):
                seen = shape.rule_TT[first + i, first : first + T].nonzero().flatten().tolist()
                context = (*self.memory[b], *(block[j] for j in seen))
                probs_BTV[b, i] = self.table.row(context)
        return Output(probs_BTV)

    def keep_paths(self, paths, active):
        for b, path in enumerate(paths):
            if active[b]:
                self.memory[b] += [self.blocks[b][node] for node in (0, *path)]

    def is_greedy(self, b):
        return False

    ranking = contextlib.nullcontext


class FixedTrees(TreeTuner):
    """Takes the given plans, one after the other, with trees of the given shape."""

    def __init__(self, plans, tree: TreeShape):
        super().__init__(list(plans), lambda stage, num_guesses: 1.0, use_clock=False)
        self._schedule, self._tree = itertools.cycle(plans), tree

    def choose(self):
        self.plan = next(self._schedule)
        return self.plan

    def shape(self, plan):
        return self._tree


class ScriptedTrees(ScriptedSource):
    """A scripted source that draws and walks trees, too."""

    is_listed = False
    draw_by = staticmethod(draw_children)
    walk_by = staticmethod(walk)

    def draw(self, b, probs_V, num_children, position):
        numbers = self.next_numbers(b, lambda: draws(probs_V, num_children))
        return self.draw_by(probs_V, numbers or [0.5] * num_children)

    def walk(self, proposal, b, probs_NV, start):
        numbers = self.next_numbers(b, lambda: walks(proposal, b, probs_NV))
        return self.walk_by(proposal, b, probs_NV, numbers or [0.5] * len(proposal.shape))

    def next_numbers(self, b, outcomes):
        """What the script says; notes the outcomes of a decision that it says nothing of."""
        self.step[b] += 1
        if self.step[b] <= len(self.scripts[b]):
            return self.scripts[b][self.step[b] - 1]
        if b not in self.frontier:
            self.frontier[b] = outcomes()
        return None


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


def walks(proposal: TreeProposal, b, probs_NV, node=0, reached=1.0, numbers=None):
    """Every way through a tree, by the textbook."""
    shape, found = proposal.shape, []
    numbers = numbers or [0.5] * len(shape)
    rest_V, rest = probs_NV[node], reached
    if shape.children[node]:
        q_V = proposal.probs_BNV[b, shape.inner.index(node)].clone()
    for child in shape.children[node]:
        token = proposal.tokens[b][child - 1]
        if token == MISSING:
            break
        own_V = q_V / q_V.sum()
        accept = min(1.0, float(rest_V[token] / own_V[token]))
        if accept > 0:
            passed = [*numbers]
            passed[child] = accept * (1 - EDGE)
            found += walks(proposal, b, probs_NV, child, rest * accept, passed)
        if accept == 1:
            return found
        numbers[child] = accept + (1 - accept) * EDGE
        rest *= 1 - accept
        left_V = (rest_V - own_V).clamp_min(0)
        rest_V = left_V / left_V.sum()
        q_V[token] = 0
    for share, number in cells(rest_V):
        found.append((rest * share, [number, *numbers[1:]]))
    return found


def tree_cascade(
    source,
    batch_size,
    shape: TreeShape,
    target: Table,
    middle: Table | None,
    draft: Table | None,
    *,
    gamma2=1,
    plans=None,
    level=TreeLevel,
) -> Cascade:
    """A cascade over tables whose lowest stage guesses trees of this shape."""
    name = "naive" if middle is None else "retrieval" if draft is None else "triforce"
    gammas = (shape.depths[-1] if draft else 0), (gamma2 if middle else 0)
    tuner = FixedTrees(plans or [StepPlan(name, *gammas, tree=str(len(shape) - 1))], shape)

    def make(table, name):
        if table is None:
            return None
        runner = TreeTableRunner(table, batch_size)
        return level(runner, source, LevelStats(name), meter, runner, tuner)

    stats = Stats()
    meter = Meter(stats, tuner)
    stages = make(target, "target"), make(middle, "retrieval"), make(draft, "draft")
    texts = [list(PROMPT) for _ in range(batch_size)]
    return running(Cascade(texts, stats, tuner, *stages, meter=meter))
