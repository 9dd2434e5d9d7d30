"""Speculative sampling of trees: how nodes are drawn, and which path through them is accepted.

The children of a node are drawn without replacement from the drafter's distribution after the node,
and tested in that order: the first against the verifier's p, each later one against the residual of
p after the rejected siblings, with a new random number each (Sequoia, arXiv 2402.12374, algorithm
2). If no child is accepted, the next token comes from the last residual. So every token follows p
exactly. At temperature 0 the likeliest tokens are tried: one that the drafter's distribution
excludes counts as drawn from a one-hot distribution.

Legend: B rows, N nodes with the root, V vocab.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minitri.core.decoding.sampling import sample
from minitri.core.decoding.verification import Proposal
from minitri.trees.tree_shape import TreeShape

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
    tokens = list[int]()
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
    path = list[int]()
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
