"""The paper's drafters as plug-ins: a datastore, and layers of the target."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minitri.core.model.llama import Llama
from tests.core.rigs import fresh_read, random_prompt, tiny_config, tiny_model
from tools.paper.baselines.datastore import LONGEST, Datastore
from tools.paper.baselines.skipped_layers import with_layers

END = 30
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=25), min_size=1, max_size=4)


def brute_force(texts: list[list[int]], sequence: list[int]) -> int | None:
    """The definition: a vote on what follows the longest match, at all places of all texts."""
    tokens = [token for text in texts for token in (*text, END)]
    for n in range(min(LONGEST, len(sequence)), 1, -1):
        ends = range(n, len(tokens))
        votes = Counter(tokens[end] for end in ends if tokens[end - n : end] == sequence[-n:])
        if votes:
            winner = max(votes, key=lambda token: (votes[token], -token))
            return winner if winner != END else None
    return None


@given(TEXTS, st.lists(st.integers(0, 3), max_size=12))
def test_what_most_often_followed_the_longest_match_is_found(texts, sequence):
    assert Datastore(texts, END).guess(sequence, 0) == brute_force(texts, sequence)


@pytest.mark.parametrize("layers", [[4], [1, 2, 4], [0, 1, 2, 3, 4]])
def test_a_view_is_the_model_of_these_layers_and_has_no_weights(layers):
    config = tiny_config(num_layers=5)
    model, expected = tiny_model(config), tiny_model(tiny_config(num_layers=len(layers)))
    weights = dict(model.named_parameters())
    for name, weight in expected.named_parameters():
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(layers[int(parts[1])])
        weight.copy_(weights[".".join(parts)])
    tokens, view = random_prompt(config, 9), with_layers(model, layers)
    assert isinstance(view, Llama)
    assert torch.equal(fresh_read(view, tokens)[1], fresh_read(expected, tokens)[1])
    assert {id(w) for w in view.parameters()} <= {id(w) for w in model.parameters()}
    assert (model.config.num_layers, len(model.layers)) == (5, 5)
