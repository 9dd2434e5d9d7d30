"""A level of the cascade that can guess a tree, and verify one.

The lowest level grows a tree depth by depth: every pass reads the nodes so far and gives the
distributions from which the children of the deepest are drawn. The level above reads the root and
all nodes in one pass, in which each sees its ancestors only. The accepted path is moved together in
its cache, as if it had been a chain; and what it emits is a chain, with the rows of p it was
sampled from, so nothing above knows of trees.

Legend: B rows, N nodes, T nodes of a pass, V vocab, L layers, H query heads, D head dim.
"""

import torch
from torch import Tensor

from minitri.decoding.level import Emitted, Level, Output, Runner
from minitri.decoding.meter import Meter
from minitri.decoding.verification import NotFiniteError, Proposal
from minitri.model.block import forward_block, make_block
from minitri.model.cache import gather_path
from minitri.runner import ModelRunner
from minitri.stats import LevelStats
from minitri.trees.shape import TreeShape, shape_of
from minitri.trees.walk import MISSING, CoupledTrees, IndependentTrees, TreeProposal, likeliest


class TreeRunner:
    """A `ModelRunner` that is given trees."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def next_probs_of_tree(self, blocks: list[list[int]], shape: TreeShape, first: int) -> Output:
        """Distributions (B, T, V) after each of a tree's nodes from number `first` on, which is 0,
        the root, or 1 where that has been read.

        `blocks[b]` are the tokens of the first T of these nodes in row b; any token stands for
        MISSING ones. What the cache holds stays as it is, see `keep_paths`.
        """
        runner = self._runner
        T = len(blocks[0])
        depths_T = torch.tensor(shape.depths[first : first + T]) - first
        rule_TT = shape.rule_TT[first : first + T, first : first + T].to(runner.model.device)
        read = [[max(token, 0) for token in row] for row in blocks]
        block = make_block(runner.model, read, runner.cache, T, depths_T)
        hidden_BTE = forward_block(
            runner.model, block, runner.cache, runner.passes.queries_LBTHD, rule_TT
        )
        return runner.output(hidden_BTE)

    def keep_paths(self, paths: list[list[int]], active: list[bool]) -> None:
        """Keeps the root of the tree just read, and a path through it, in every active row."""
        runner = self._runner
        for b, path in enumerate(paths):
            if active[b] and path != list(range(1, len(path) + 1)):
                runner.cache.keep_path(b, path)
                if runner.passes.queries_LBTHD is not None:
                    gather_path(runner.passes.queries_LBTHD.transpose(2, 3), b, 0, path)
        counts = [1 + len(path) if on else 0 for path, on in zip(paths, active, strict=True)]
        runner.cache.advance(counts)

    def is_greedy(self, b: int) -> bool:
        """Whether row b's distributions are one-hot."""
        return self._runner.sampling[b].temperature == 0


class TreeLevel(Level):
    """A `Level` that guesses trees where the plan has some, and verifies whatever it is given."""

    _source: IndependentTrees | CoupledTrees

    def __init__(
        self,
        runner: Runner,
        source: IndependentTrees | CoupledTrees,
        stats: LevelStats,
        meter: Meter,
        trees: TreeRunner,
    ) -> None:
        """`trees` reads trees with the model and the cache of `runner`."""
        super().__init__(runner, source, stats, meter)
        self.trees = trees

    def shape(self) -> TreeShape | None:
        """The tree that the plan of this step asks for; None for chains."""
        plan = self._meter.tuner.plan
        return shape_of(plan) if plan.tree else None

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """A tree for every active row if this is the lowest level, and the plan has one."""
        shape = self.shape()
        if shape is None or self.below is not None:
            return super().propose(sequences, active)
        return self._grow(shape, sequences, active)

    def _grow(
        self, shape: TreeShape, sequences: list[list[int]], active: list[bool]
    ) -> TreeProposal:
        """Draws all nodes, depth by depth; of greedy rows the likeliest ones."""
        is_greedy = [self.trees.is_greedy(b) for b in range(len(sequences))]
        nodes = [[*last_of(sequence), *[MISSING] * (len(shape) - 1)] for sequence in sequences]
        probs = list[Tensor]()
        first = 0
        for size in shape.sizes[:-1]:
            with self._meter.drafting(self.stats, sum(active), max(first + size - 2, 0)):
                if first == 0:
                    output = self.runner.next_probs(sequences, active, wants_logits=any(is_greedy))
                else:
                    read = [row[1 : first + size] for row in nodes]
                    output = self.trees.next_probs_of_tree(read, shape, 1)
                require_finite(output.probs_BNV, is_drafter=self.stats.name == "draft")
                for place in range(-size, 0):  # the deepest nodes, which are the last ones read
                    parent = first + size + place
                    children = shape.children[parent]
                    if not children:
                        continue
                    probs.append(output.probs_BNV[:, place])
                    for b, row in enumerate(nodes):
                        if active[b] and row[parent] != MISSING:
                            position = len(sequences[b]) + shape.depths[parent]
                            tokens = self._draw(b, output, place, len(children), position)
                            row[children[0] : children[-1] + 1] = tokens
            first += size
        return TreeProposal.of(
            [row[1:] for row in nodes],
            torch.stack(probs, 1),
            [[self.stats.name] * (len(shape) - 1)] * len(sequences),
            shape=shape,
            is_listed=[self._source.is_listed or greedy for greedy in is_greedy],
        )

    def _draw(
        self, b: int, output: Output, place: int, num_children: int, position: int
    ) -> list[int]:
        """Tokens of the children of the node at this place of row b's block."""
        if self.trees.is_greedy(b) and output.logits_BNV is not None:
            return likeliest(output.logits_BNV[b, place], num_children)
        return self._source.draw(b, output.probs_BNV[b, place], num_children, position)

    def verify(
        self,
        sequences: list[list[int]],
        active: list[bool],
        proposal: Proposal,
        *,
        wants_logits: bool = False,
    ) -> list[Emitted]:
        """See `Level.verify`. Of a tree, the accepted path and one token more are appended."""
        if not isinstance(proposal, TreeProposal):
            return super().verify(sequences, active, proposal, wants_logits=wants_logits)
        pairs = zip(sequences, proposal.tokens, strict=True)
        blocks = [[*last_of(sequence), *guesses] for sequence, guesses in pairs]
        output = self.trees.next_probs_of_tree(blocks, proposal.shape, 0)
        require_finite(output.probs_BNV)
        paths, emitted = list[list[int]](), list[Emitted]()
        for b, sequence in enumerate(sequences):
            if active[b]:
                path, token = self._source.walk(proposal, b, output.probs_BNV[b], len(sequence))
                own = "recovered" if proposal.shape.children[[0, *path][-1]] else "bonus"
                tokens = [*(proposal.tokens[b][node - 1] for node in path), token]
                origins = [*(proposal.origins[b][node - 1] for node in path), own]
                paths.append(path)
                emitted.append(output.emitted(b, tokens, origins, [0, *path]))
            else:
                paths.append([])
                emitted.append(output.emitted(b, [], [], []))
        self.trees.keep_paths(paths, active)
        self._append(sequences, emitted)
        return emitted


def last_of(sequence: list[int]) -> list[int]:
    """The last token; any in a row that never had a text."""
    return sequence[-1:] or [0]


def require_finite(probs: Tensor, *, is_drafter: bool = False) -> None:
    """Raises `NotFiniteError`."""
    if not bool(probs.sum().isfinite()):
        raise NotFiniteError(is_drafter=is_drafter)
