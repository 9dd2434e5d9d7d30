"""A level of the cascade that can guess a tree, and verify one.

The lowest level grows a tree depth by depth: every pass reads the nodes so far and gives the
distributions from which the children of the deepest are drawn. The level above reads the root and
all nodes in one pass, in which each sees its ancestors only. The accepted path is moved together in
its cache, as if it had been a chain; and what it emits is a chain, with the rows of p it was
sampled from, so nothing above knows of trees.

Legend: B rows, N nodes, V vocab.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minitri.decoding.level import Emitted, Level, Runner
from minitri.decoding.verification import NotFiniteError, Proposal
from minitri.trees.random_source import TreeSource
from minitri.trees.shape import TreeShape
from minitri.trees.tuner import TreeTuner
from minitri.trees.verification import MISSING, TreeProposal, likeliest


class TreeRunner(Runner, Protocol):
    """A runner that reads trees; see `runner.ModelRunner`."""

    def next_probs_of_tree(
        self, blocks: list[list[int]], shape: TreeShape, first: int
    ) -> Tensor: ...

    def keep_paths(self, paths: list[list[int]], active: list[bool]) -> None: ...

    def is_greedy(self, b: int) -> bool: ...

    def ranking(self) -> AbstractContextManager[None]: ...


class TreeLevel(Level):
    """A `Level` that guesses trees where the plan has some, and verifies whatever it is given."""

    runner: TreeRunner
    _source: TreeSource
    _tuner: TreeTuner

    def propose(self, sequences: list[list[int]], active: list[bool]) -> Proposal:
        """A tree for every active row if this is the lowest level, and the plan has one."""
        plan = self._tuner.plan
        if not plan.tree or self.below is not None or self._is_off:
            return super().propose(sequences, active)
        is_greedy = [self.runner.is_greedy(b) for b in range(len(sequences))]
        try:
            with self.runner.ranking():
                return self._grow(self._tuner.shape(plan), sequences, active, is_greedy)
        except NotFiniteError:
            self.switch_off()
            return Proposal.nothing(len(sequences))

    def _grow(
        self, shape: TreeShape, sequences: list[list[int]], active: list[bool],
        is_greedy: list[bool],
    ) -> TreeProposal:  # fmt: skip
        """Draws all nodes, depth by depth."""
        B, probs, first = len(sequences), list[Tensor](), 0
        blocks = [[sequence[-1]] + [MISSING] * (len(shape) - 1) for sequence in sequences]
        for size in shape.sizes[:-1]:
            started = self._clock.now()
            if first == 0:
                probs_BNV = self.runner.next_probs(sequences, active)
            else:
                read = [no_missing(block[1 : first + size]) for block in blocks]
                probs_BNV = self.runner.next_probs_of_tree(read, shape, 1)[:, -size:]
            require_finite(probs_BNV)
            for node, probs_BV in enumerate(probs_BNV.unbind(1), first):
                if children := shape.children[node]:
                    probs.append(probs_BV)
                    for b, block in enumerate(blocks):
                        if active[b] and block[node] != MISSING:
                            drawn = self._draw(
                                b, probs_BV[b], len(children),
                                len(sequences[b]) + shape.depths[node], is_greedy=is_greedy[b],
                            )  # fmt: skip
                            block[children[0] : children[-1] + 1] = drawn
            first += size
            self._record_draft(max(first - 2, 0), active, started)
        return TreeProposal.of(
            [block[1:] for block in blocks], torch.stack(probs, 1),
            [[self.stats.name] * (len(shape) - 1)] * B, shape=shape,
            is_listed=[self._source.is_listed or greedy for greedy in is_greedy],
        )  # fmt: skip

    def _draw(
        self, b: int, probs_V: Tensor, num_children: int, position: int, *, is_greedy: bool
    ) -> list[int]:
        if is_greedy:
            return likeliest(probs_V.log(), num_children)
        return self._source.draw(b, probs_V, num_children, position)

    def verify(
        self, sequences: list[list[int]], active: list[bool], proposal: Proposal
    ) -> tuple[list[Emitted], Tensor]:
        """See `Level.verify`. Of a tree, the accepted path and one token more are appended."""
        if not isinstance(proposal, TreeProposal):
            return super().verify(sequences, active, proposal)
        starts, shape = [len(sequence) for sequence in sequences], proposal.shape
        rows = zip(sequences, proposal.tokens, strict=True)
        blocks = [no_missing([sequence[-1], *guesses]) for sequence, guesses in rows]
        probs_BNV = self.runner.next_probs_of_tree(blocks, shape, 0)
        require_finite(probs_BNV)
        paths, emitted = list[list[int]](), list[Emitted]()
        for b, sequence in enumerate(sequences):
            path, new = list[int](), Emitted([], [])
            if active[b]:
                path, token = self._source.walk(proposal, b, probs_BNV[b], starts[b])
                last = path[-1] if path else 0
                own = "recovered" if shape.children[last] else "bonus"
                guesses = [proposal.tokens[b][node - 1] for node in path]
                origins = [proposal.origins[b][node - 1] for node in path]
                new = Emitted([*guesses, token], [*origins, own])
                sequence += new.tokens
                self._note_path(proposal, b, path)
            paths.append(path)
            emitted.append(new)
        self.runner.keep_paths(paths, active)
        self.crop([start + len(path) for start, path in zip(starts, paths, strict=True)])
        kept = [probs_BNV[b, [0, *path]] for b, path in enumerate(paths)]
        return emitted, pad_sequence(kept, batch_first=True)

    def _note_path(self, proposal: TreeProposal, b: int, path: list[int]) -> None:
        assert self.below is not None
        children, parents = proposal.shape.children, [0, *path]
        ranks = [children[parent].index(node) for parent, node in zip(parents, path, strict=False)]
        rejected = (proposal.tokens[b][node - 1] for node in children[parents[-1]])
        num_rejected = sum(token != MISSING for token in rejected)
        self._tuner.note_path(self.below.stats.name, ranks, num_rejected)

    def _record(
        self, proposal: Proposal, emitted: list[Emitted], started: Any, guessing: list[bool]
    ) -> None:
        if not isinstance(proposal, TreeProposal):
            super()._record(proposal, emitted, started, guessing)
            return
        self._clock.since(started, partial(self._note_seconds, len(proposal.shape) - 1))
        for row in emitted:
            if row.tokens:
                self.stats.record(proposal.shape.depths[-1], len(row.tokens) - 1)


def no_missing(tokens: list[int]) -> list[int]:
    """Any token in the place of missing ones, which nothing behind them outlives."""
    return [max(token, 0) for token in tokens]


def require_finite(probs: Tensor) -> None:
    """Raises `NotFiniteError`."""
    if not bool(probs.sum().isfinite()):
        raise NotFiniteError
