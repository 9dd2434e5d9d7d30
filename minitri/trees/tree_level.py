"""Trees of guesses: how a level of the cascade draws one, and how a level verifies it.

The lowest level grows a tree, one pass for each depth. The level above reads all nodes in one pass,
in which a node sees only its ancestors; then K and V of the accepted path are moved together, as if
the path had been a chain. The verifying level emits a chain, so no level above knows of trees.

The children of a node are drawn without replacement from the drafter's distribution after the node,
and tested in that order: the first against the verifier's p, each later one against the residual of
p after the rejected siblings, with a new random number each (Sequoia, arXiv 2402.12374, algorithm
2). If no child is accepted, the next token comes from the last residual. So every token follows p
exactly. At temperature 0 the likeliest tokens are tried: one that the drafter's distribution
excludes counts as drawn from a one-hot distribution.
Legend: B rows, N nodes with the root, T nodes of a pass, V vocab, L layers, H heads, D head dim.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from minitri.core.decoding.level import Level
from minitri.core.decoding.random_source import CoupledSource, IndependentSource
from minitri.core.decoding.sampling import gumbel_argmax, gumbel_scores, sample
from minitri.core.decoding.verification import Active, Emitted, Output, Proposal, Rows
from minitri.core.model.cache import gather_path
from minitri.core.settings import StepPlan
from minitri.trees.tree_shape import TreeShape, shape_of

MISSING = -1
"""The token of a node that could not be drawn: earlier siblings took all possible tokens."""


@dataclass(frozen=True)
class TreeProposal(Proposal):
    """Trees of guesses, of one shape for all rows. `tokens[b][i]` is of node i + 1, or MISSING.
    `probs_BNV` are the distributions that the children of each node were drawn from."""

    shape: TreeShape  # the nodes of every row's tree

    def depth(self, b: int) -> int:
        """Depth of row b's tree; 0 where nothing was guessed."""
        return self.shape.depths[-1] if self.tokens[b][0] != MISSING else 0


def draw_children(probs_V: Tensor, uniforms: Tensor) -> list[int]:
    """Draws a token for each of `uniforms` in [0, 1), without replacement; MISSING if none left."""
    left_V = probs_V.clone()
    tokens = []
    for uniform in uniforms.to(probs_V.device):
        token = int(sample(left_V, uniform))
        tokens.append(token if left_V[token] > 0 else MISSING)
        left_V[token] = 0
    return tokens


def likeliest(scores_V: Tensor, count: int) -> list[int]:
    """The `count` tokens with the highest scores, MISSING where only minus infinity is left."""
    best = scores_V.topk(min(count, len(scores_V)))
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    tokens = [token if score > -math.inf else MISSING for score, token in pairs]
    return tokens + [MISSING] * (count - len(tokens))


def walk(
    proposal: TreeProposal, b: int, probs_NV: Tensor, uniforms: Tensor
) -> tuple[list[int], int]:
    """The accepted nodes of row b after the root, and the token that follows them.
    `probs_NV` are the verifier's distributions after all nodes; `uniforms` in [0, 1) are for the
    test of each node, the root's for the last token."""
    path = []
    node = 0
    while True:
        rest_V = probs_NV[node]
        children = proposal.shape.children[node]
        left_V = proposal.probs_BNV[b, node].clone() if children else rest_V
        for child in children:
            token = proposal.tokens[b][child - 1]
            if token == MISSING:
                continue
            q_V = left_V / left_V.sum()
            if left_V[token] == 0:
                q_V = torch.nn.functional.one_hot(torch.tensor(token), len(q_V)).to(q_V)
            if float(uniforms[child]) * float(q_V[token]) < float(rest_V[token]):
                path.append(child)
                node = child
                break
            residual_V = (rest_V - q_V).clamp_min(0)
            mass = float(residual_V.sum())
            rest_V = residual_V / mass if mass > 0 else rest_V
            left_V[token] = 0
        else:
            return path, int(sample(rest_V, uniforms[0].to(rest_V.device)))


class TreeLevel(Level):
    """A cascade level that guesses trees or chains, as a step's plan says, and verifies either."""

    source: IndependentSource | CoupledSource  # of random numbers

    def capture(self, plans: Iterable[StepPlan]) -> None:
        super().capture(plans)
        if self.runner.block_sizes and any(plan.tree for plan in plans):
            B = len(self.runner.sampling)
            self.read_tree([[]] * B, [False] * B, [[0]] * B, TreeShape((-1,)), 0)

    def shape(self) -> TreeShape | None:
        """The shape of the tree in this step's plan; None if the plan has chains."""
        plan = self._meter.tuner.plan
        return shape_of(plan) if plan.tree else None

    def propose(self, sequences: Rows, active: Active) -> Proposal:
        """Guesses what follows the active rows of `sequences`: if this is the lowest level and the
        plan has a tree, one `TreeProposal` for all rows, else chains, as `Level.propose`."""
        shape = self.shape()
        if not shape or self.below:
            return super().propose(sequences, active)
        nodes = [[0, *[MISSING] * (len(shape) - 1)] for _ in sequences]
        probs = []
        for first, end in itertools.pairwise(itertools.accumulate(shape.sizes[:-1], initial=0)):
            self.stats.num_rounds += sum(active)
            with self.timed_round(max(end - 2, 0)):
                if first == 0:
                    output = self.runner.next_probs(sequences, active)
                else:
                    blocks = [row[1:end] for row in nodes]
                    output = self.read_tree(sequences, active, blocks, shape, 1)
                for parent in range(first, end):
                    place = max(parent - 1, 0)  # the root was read in a pass of its own
                    probs.append(output.probs_BNV[:, place])
                    children = shape.children[parent]
                    for b, row in enumerate(nodes):
                        if children and active[b] and row[parent] != MISSING:
                            position = len(sequences[b]) + shape.depths[parent]
                            tokens = self.draw(b, output, place, len(children), position)
                            row[children[0] : children[-1] + 1] = tokens
        probs_BNV = torch.stack(probs, 1)
        active_B11 = torch.tensor(active).view(-1, 1, 1).to(probs_BNV.device, non_blocking=True)
        return TreeProposal.of(
            [row[1:] for row in nodes],
            probs_BNV.where(active_B11, 0.0),  # other rows read padding
            self.name,
            shape=shape,
        )

    def draw(
        self, b: int, output: Output, place: int, num_children: int, position: int
    ) -> list[int]:
        """Draws `num_children` tokens from the distribution at `place` of `output`'s row b, without
        replacement; at temperature 0 the likeliest; with a `CoupledSource` those with the highest
        scores log p + Gumbel noise of the children's `position` in the text."""
        probs_V = output.probs_BNV[b, place]
        if self.runner.sampling[b].temperature == 0:
            return likeliest(output.filtered_BNV[b, place], num_children)
        if isinstance(self.source, CoupledSource):
            key = self.source.keys(b, torch.tensor(position)).to(probs_V.device)
            return likeliest(gumbel_scores(probs_V, key), num_children)
        return draw_children(probs_V, self.source.uniforms(b, num_children))

    def walk(
        self, proposal: TreeProposal, b: int, probs_NV: Tensor, start: int
    ) -> tuple[list[int], int]:
        """The accepted nodes of row b's tree, without the root, and the next token, by random
        numbers of `source`. `probs_NV`: p after each node; `start`: length of the row's text."""
        if isinstance(self.source, CoupledSource):  # the noise of a position decides its token
            positions_N = start + torch.tensor(proposal.shape.depths)
            keys_N = self.source.keys(b, positions_N).to(probs_NV.device)
            tokens_N = gumbel_argmax(probs_NV[: len(keys_N)], keys_N)
            one_hot_NV = torch.nn.functional.one_hot(tokens_N, probs_NV.shape[1])
            return walk(proposal, b, one_hot_NV, torch.zeros(len(keys_N)))
        # A row without guesses takes as many numbers as it would without trees next to it.
        count = len(proposal.shape) if proposal.depth(b) else 1
        return walk(proposal, b, probs_NV, self.source.uniforms(b, count))

    def verify(self, sequences: Rows, active: Active, proposal: Proposal) -> list[Emitted]:
        """Verifies a tree per row in one pass, or a chain as `Level.verify`. Appends the accepted
        path and one more token to each active row of `sequences`; returns them."""
        if not isinstance(proposal, TreeProposal):
            return super().verify(sequences, active, proposal)
        pairs = zip(sequences, proposal.tokens, strict=True)
        blocks = [[*(sequence[-1:] or [0]), *guesses] for sequence, guesses in pairs]
        output = self.read_tree(sequences, active, blocks, proposal.shape, 0)
        sums_B = output.probs_BNV.sum((1, 2)) + proposal.probs_BNV.sum((1, 2))
        are_finite = sums_B.isfinite().tolist()
        paths = Rows()
        emitted = []
        for b, block in enumerate(blocks):
            path, tokens, origins = list[int](), list[int](), list[str]()
            if active[b] and are_finite[b]:
                path, token = self.walk(proposal, b, output.probs_BNV[b], len(sequences[b]))
                last = "recovered" if proposal.shape.children[[0, *path][-1]] else "bonus"
                origins = [*proposal.origins[b][: len(path)], last]
                tokens = [*(block[node] for node in path), token]
            paths.append(path)
            emitted.append(output.emitted(b, tokens, origins, [0, *path][: len(tokens)]))
        self.keep_paths(paths, active)
        self._append(sequences, emitted)
        return emitted

    def read_tree(
        self, sequences: Rows, active: Active, blocks: Rows, shape: TreeShape, first: int
    ) -> Output:
        """Reads T nodes of each row's tree, from node `first` on, with tokens `blocks`; returns the
        distributions (B, T, V) after them. Cache lengths do not change: call `keep_paths` later."""
        nodes = slice(first, first + len(blocks[0]))
        depths = [depth - first for depth in shape.depths[nodes]]
        mask_TT = shape.mask_TT[nodes, nodes]
        tokens = [[max(token, 0) for token in row] for row in blocks]
        return self.runner.read_tree(
            sequences, active, tokens, depths, mask_TT, has_root=first == 0
        )

    def keep_paths(self, paths: Rows, active: Active) -> None:
        """Keeps in the cache of every active row the root and the nodes `paths[b]` of its tree."""
        runner = self.runner
        for b, path in enumerate(paths):
            if path != list(range(1, len(path) + 1)):
                runner.cache.keep_path(b, path)
                if runner.passes.queries_LBTHD is not None:
                    gather_path(runner.passes.queries_LBTHD.transpose(2, 3), b, 0, path)
        pairs = zip(paths, active, strict=True)
        runner.cache.advance([1 + len(path) if on else 0 for path, on in pairs])
