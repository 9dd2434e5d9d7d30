"""Speculative sampling of trees: how the nodes are drawn, and which path through them is accepted.

The children of a node are drawn without replacement from the drafter's distribution after it, and
tested in that order: the first against the verifier's p, each later one against what its rejected
siblings left of p, with a fresh random number every time (Sequoia, arXiv 2402.12374, algorithm 2).
Where no child is accepted, the next token comes from what is left. So every token follows p
exactly. *Listed* children are the likeliest ones: each drawn from a one-hot distribution.

Legend: B rows, N nodes with the root, V vocab.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minitri.core.decoding.noise import gumbel_argmax, gumbel_scores
from minitri.core.decoding.random_source import CoupledSource, IndependentSource
from minitri.core.decoding.sampling import sample
from minitri.core.decoding.verification import Proposal
from minitri.trees.tree_shape import TreeShape

Source = IndependentSource | CoupledSource
MISSING = -1
"""The token of a child that could not be drawn: its elder siblings are all the tokens there are."""


@dataclass(frozen=True)
class TreeProposal(Proposal):
    """Guesses of one shape for every row: `tokens[b][i]` is that of node i + 1, or MISSING;
    `probs_BNV` holds, for every node but the deepest, what its children were drawn from."""

    shape: TreeShape
    is_listed: list[bool]
    """Rows whose nodes were chosen without chance."""

    def depth(self, b: int) -> int:
        """That of the tree; 0 where nothing was guessed."""
        return self.shape.depths[-1] if self.tokens[b][0] != MISSING else 0


def draw_children(probs_V: Tensor, uniforms: Tensor) -> list[int]:
    """Different tokens, one per number in [0, 1), each drawn from what the others left."""
    left_V = probs_V.clone()
    tokens = list[int]()
    for uniform in uniforms.to(probs_V.device):
        token = int(sample(left_V, uniform))
        tokens.append(token if left_V[token] > 0 else MISSING)
        left_V[token] = 0
    return tokens


def likeliest(scores_V: Tensor, count: int) -> list[int]:
    """The tokens with the highest scores, MISSING where only minus infinity is left."""
    best = scores_V.topk(min(count, len(scores_V)))
    pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
    tokens = [token if score > -math.inf else MISSING for score, token in pairs]
    return tokens + [MISSING] * (count - len(tokens))


def walk(
    proposal: TreeProposal, b: int, probs_NV: Tensor, uniforms: Tensor
) -> tuple[list[int], int]:
    """The accepted nodes of row b, from the root's child on, and the token after them. `probs_NV`
    are the verifier's distributions after every node; `uniforms` are independent numbers in [0, 1),
    one per test of a node, that of the root for the last token."""
    path = list[int]()
    node = 0
    while True:
        rest_V = probs_NV[node]
        children = proposal.shape.children[node]
        if children:  # what they were drawn from, one after the other
            left_V = proposal.probs_BNV[b, node].clone()
        for child in children:
            token = proposal.tokens[b][child - 1]
            if token == MISSING:
                continue
            q_V = left_V / left_V.sum()
            if proposal.is_listed[b]:
                q_V = F.one_hot(torch.tensor(token), len(q_V)).to(q_V)
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


def draw(source: Source, b: int, probs_V: Tensor, num_children: int, position: int) -> list[int]:
    """Tokens of a node's children, for `position` of row b: drawn by fresh uniform numbers, or the
    likeliest under the noise that coupled stages share there."""
    if isinstance(source, CoupledSource):
        key = source.keys(b, torch.tensor(position)).to(probs_V.device)
        return likeliest(gumbel_scores(probs_V, key), num_children)
    return draw_children(probs_V, source.uniforms(b, num_children))


def walk_by_source(
    source: Source, proposal: TreeProposal, b: int, probs_NV: Tensor, start: int
) -> tuple[list[int], int]:
    """`walk` for row b, whose text has `start` tokens, by numbers of its random source."""
    if isinstance(source, CoupledSource):  # the noise of a position determines the token there
        keys_N = source.keys(b, start + torch.tensor(proposal.shape.depths)).to(probs_NV.device)
        tokens_N = gumbel_argmax(probs_NV[: len(keys_N)], keys_N)
        one_hot_NV = F.one_hot(tokens_N, probs_NV.shape[1])
        return walk(proposal, b, one_hot_NV, torch.zeros(len(keys_N)))
    # A row without guesses takes as many numbers as it would without trees next to it.
    count = len(proposal.shape) if proposal.depth(b) else 1
    return walk(proposal, b, probs_NV, source.uniforms(b, count))
