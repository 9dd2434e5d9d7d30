"""Reads trees of guesses with a runner's model, cache and filters, a pass for all rows.

Legend: B rows, T nodes of a pass, V vocab, L layers, H query heads, D head dim.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch

from minitri.decoding.level import Output
from minitri.model.block import forward_block, make_block
from minitri.model.cache import TreeCache, gather_path
from minitri.runner import ModelRunner
from minitri.trees.shape import TreeShape


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
        runner, T = self._runner, len(blocks[0])
        depths_T = torch.tensor(shape.depths[first : first + T]) - first
        rule_TT = shape.rule_TT[first : first + T, first : first + T].to(runner.model.device)
        block = make_block(runner.model, blocks, runner.cache, T, depths_T)
        hidden_BTE = forward_block(runner.model, block, runner.cache, runner.queries_LBTHD, rule_TT)
        return runner.output(hidden_BTE)

    def keep_paths(self, paths: list[list[int]], active: list[bool]) -> None:
        """Keeps the root of a tree that was just read, and the nodes of a path through it, in every
        active row."""
        runner = self._runner
        for b, path in enumerate(paths):
            if active[b] and path != list(range(1, len(path) + 1)):
                cast(TreeCache, runner.cache).keep_path(b, path)
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
