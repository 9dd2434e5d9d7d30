"""A level of the cascade that can guess a tree, and verify one.

The lowest level grows a tree depth by depth: every pass reads the nodes so far and gives the
distributions from which the children of the deepest are drawn. The level above reads the root and
all nodes in one pass, in which each sees its ancestors only. The accepted path is moved together in
its cache, as if it had been a chain; and what it emits is a chain, with the rows of p it was
sampled from, so nothing above knows of trees.

Legend: B rows, N nodes, T nodes of a pass, V vocab, L layers, H query heads, D head dim.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minitri.decoding.level import Emitted, Level, Output, Runner
from minitri.decoding.meter import Meter
from minitri.decoding.verification import NotFiniteError, Proposal
from minitri.model.block import forward_block, make_block
from minitri.model.cache import gather_path
from minitri.runner import ModelRunner
from minitri.stats import LevelStats
from minitri.trees.shape import TreeShape
from minitri.trees.tuner import TreeTuner
from minitri.trees.walk import MISSING, CoupledTrees, IndependentTrees, TreeProposal, likeliest


class TreeRunner:
    """A `ModelRunner` that is given trees."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def next_probs_of_tree(self, blocks: list[list[int]], shape: TreeShape, first: int) -> Output:
        """Distributions (B, T, V) after each of a tree's nodes from number `first` on, which is 0,
        the root, or 1 where that has been read.

        `blocks[b]` are the tokens of the first T of these nodes in row b. What the cache holds
        stays as it is, see `keep_paths`.
        """
        runner = self._runner
        T = len(blocks[0])
        depths_T = torch.tensor(shape.depths[first : first + T]) - first
        rule_TT = shape.rule_TT[first : first + T, first : first + T].to(runner.model.device)
        block = make_block(runner.model, blocks, runner.cache, T, depths_T)
        hidden_BTE = forward_block(runner.model, block, runner.cache, runner.queries_LBTHD, rule_TT)
        return runner.output(hidden_BTE)

    def keep_paths(self, paths: list[list[int]], active: list[bool]) -> None:
        """Keeps the root of the tree just read, and a path through it, in every active row."""
        runner = self._runner
        for b, path in enumerate(paths):
            if active[b] and path != list(range(1, len(path) + 1)):
                runner.cache.keep_path(b, path)
                if runner.queries_LBTHD is not None:
                    gather_path(runner.queries_LBTHD.transpose(2, 3), b, 0, path)
        counts = [1 + len(path) if on else 0 for path, on in zip(paths, active, strict=True)]
        runner.cache.advance(counts)

    def is_greedy(self, b: int) -> bool:
        """Whether row b's distributions are one-hot."""
        return self._runner.sampling[b].temperature == 0

    @contextlib.contextmanager
    def ranking(self) -> Iterator[None]:
        """Meanwhile greedy rows, too, get the model's own distribution, which ranks the tokens."""
        own = self._runner.sampling
        self._runner.sampling = [
            replace(row, temperature=1.0) if row.temperature == 0 else row for row in own
        ]
        try:
            yield
        finally:
            self._runner.sampling = own


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
        tuner: TreeTuner,
    ) -> None:
        """`trees` reads trees with the model and the cache of `runner`."""
        super().__init__(runner, source, stats, meter)
        self.trees = trees
        self.tuner = tuner

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """A tree for every active row if this is the lowest level, and the plan has one."""
        plan = self.tuner.plan
        if not plan.tree or self.below is not None:
            return super().propose(sequences, active)
        is_greedy = [self.trees.is_greedy(b) for b in range(len(sequences))]
        with self.trees.ranking():
            return self._grow(self.tuner.shape(plan), sequences, active, is_greedy)

    def _grow(
        self,
        shape: TreeShape,
        sequences: list[list[int]],
        active: list[bool],
        is_greedy: list[bool],
    ) -> TreeProposal:
        """Draws all nodes, depth by depth; of greedy rows the likeliest ones."""
        nodes = [[sequence[-1]] + [MISSING] * (len(shape) - 1) for sequence in sequences]
        probs = list[Tensor]()
        first = 0
        for size in shape.sizes[:-1]:
            with self._meter.drafting(self.stats, sum(active), max(first + size - 2, 0)):
                if first == 0:
                    probs_BNV = self.runner.next_probs(sequences, active).probs_BNV
                else:
                    read = [no_missing(row[1 : first + size]) for row in nodes]
                    probs_BNV = self.trees.next_probs_of_tree(read, shape, 1).probs_BNV[:, -size:]
                require_finite(probs_BNV, is_drafter=self.stats.name == "draft")
                for node, probs_BV in enumerate(probs_BNV.unbind(1), first):
                    if not (children := shape.children[node]):
                        continue
                    probs.append(probs_BV)
                    for b, row in enumerate(nodes):
                        if active[b] and row[node] != MISSING:
                            position = len(sequences[b]) + shape.depths[node]
                            count = len(children)
                            row[children[0] : children[-1] + 1] = (
                                likeliest(probs_BV[b].log(), count)
                                if is_greedy[b]
                                else self._source.draw(b, probs_BV[b], count, position)
                            )
            first += size
        return TreeProposal.of(
            [row[1:] for row in nodes],
            torch.stack(probs, 1),
            [[self.stats.name] * (len(shape) - 1)] * len(sequences),
            shape=shape,
            is_listed=[self._source.is_listed or greedy for greedy in is_greedy],
        )

    def verify(
        self,
        sequences: list[list[int]],
        active: list[bool],
        proposal: Proposal,
        *,
        wants_logits: bool = False,
    ) -> tuple[list[Emitted], Tensor]:
        """See `Level.verify`. Of a tree, the accepted path and one token more are appended."""
        if not isinstance(proposal, TreeProposal):
            return super().verify(sequences, active, proposal, wants_logits=wants_logits)
        starts = [len(sequence) for sequence in sequences]
        shape = proposal.shape
        rows = zip(sequences, proposal.tokens, strict=True)
        blocks = [no_missing([sequence[-1], *guesses]) for sequence, guesses in rows]
        output = self.trees.next_probs_of_tree(blocks, shape, 0)
        require_finite(output.probs_BNV)
        paths, emitted = list[list[int]](), list[Emitted]()
        for b, sequence in enumerate(sequences):
            path = list[int]()
            new = Emitted([], [])
            if active[b]:
                path, token = self._source.walk(proposal, b, output.probs_BNV[b], starts[b])
                last = path[-1] if path else 0
                own = "recovered" if shape.children[last] else "bonus"
                guesses = [proposal.tokens[b][node - 1] for node in path]
                origins = [proposal.origins[b][node - 1] for node in path]
                logits_NV = None if output.logits_BNV is None else output.logits_BNV[b, [0, *path]]
                new = Emitted([*guesses, token], [*origins, own], logits_NV)
                sequence += new.tokens
            paths.append(path)
            emitted.append(new)
        self.trees.keep_paths(paths, active)
        self.crop([start + len(path) for start, path in zip(starts, paths, strict=True)])
        kept = [output.probs_BNV[b, [0, *path]] for b, path in enumerate(paths)]
        return emitted, pad_sequence(kept, batch_first=True)

    def _note_verdict(
        self, proposal: Proposal, b: int, emitted: Emitted, proposer: str | None
    ) -> None:
        if not isinstance(proposal, TreeProposal):
            super()._note_verdict(proposal, b, emitted, proposer)
        elif proposer is None or not proposal.has_guesses(b):
            self.stats.record(0, 0)
        else:
            self.stats.record(proposal.shape.depths[-1], len(emitted.tokens) - 1)
            self.tuner.note_path(proposer, *proposal.ranks_of(b, emitted.tokens[:-1]))


def no_missing(tokens: list[int]) -> list[int]:
    """Any token in the place of missing ones, which nothing after them outlives."""
    return [max(token, 0) for token in tokens]


def require_finite(probs: Tensor, *, is_drafter: bool = False) -> None:
    """Raises `NotFiniteError`."""
    if not bool(probs.sum().isfinite()):
        raise NotFiniteError(is_drafter=is_drafter)
