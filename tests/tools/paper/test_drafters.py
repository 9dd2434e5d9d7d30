"""The paper's drafters as plug-ins: a datastore, and layers of the target."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minitri
from minitri.core.errors import InputError
from minitri.core.model.llama import Llama
from tests.cascades import settings_of
from tests.conftest import SENTENCES, write_hf_folder
from tests.core.rigs import WARM, fresh_read, random_prompt, tiny_config, tiny_model
from tools.paper.baselines.datastore import LONGEST, Datastore
from tools.paper.baselines.skipped_layers import NUM_SCORED, WINDOW, least_missed, with_layers

PROMPT = "She had been forced into prudence; she had been"
END = 30
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=25), min_size=1, max_size=4)


def brute_force(texts: list[list[int]], sequence: list[int]) -> int | None:
    """The definition: all places of all texts, then a vote on what follows the longest match."""

    def common_end(text: list[int]) -> int:
        pairs = zip(reversed(text), reversed(sequence), strict=False)
        return min(LONGEST, [*(a == b for a, b in pairs), False].index(False))

    places = [(text, i) for text in texts for i in range(1, len(text) + 1)]
    lengths = [common_end(text[:i]) for text, i in places]
    best = max(lengths, default=0)
    rests = [[*t[i:], END] for (t, i), n in zip(places, lengths, strict=True) if n == best]
    votes = Counter(rest[0] for rest in rests)
    winner = max(votes, key=lambda token: (votes[token], -token), default=END)
    return winner if best >= 2 and winner != END else None


@given(TEXTS, st.lists(st.integers(0, 3), max_size=12))
def test_what_most_often_followed_the_longest_match_is_found(texts, sequence):
    assert Datastore(texts, END).guess(sequence, 0) == brute_force(texts, sequence)


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> minitri.Engine:
    folder = write_hf_folder(tmp_path_factory.mktemp("deep") / "deep", num_hidden_layers=4)
    return minitri.load(folder, draft="suffix", dtype="float32", device="cpu")


@pytest.mark.parametrize("kind", ["said", [0, 2], [0, 1, 2, 3]], ids=str)
def test_a_baseline_guesses_and_changes_no_text(deep, kind):
    """A datastore that holds the text; some layers of the target, and all; a short prompt, and one
    longer than the window of the layers."""
    for prompt in (deep.tokenizer.encode(PROMPT), random_prompt(deep.config, 400)):
        plain = deep.complete(prompt, **settings_of(sampling=WARM, coupled=True)).token_ids
        if kind == "said":
            guesser = {"drafter": Datastore([[*prompt, *plain]], deep.tokenizer.num_tokens)}
        else:
            guesser = {"draft": with_layers(deep.model, kind)}
        engine = minitri.Engine(deep.model, deep.tokenizer, **guesser)
        settings = settings_of("naive", sampling=WARM, coupled=True, gamma1=3)
        for _ in range(2):  # the second with what the first left
            done = engine.complete(prompt, **settings)
            assert done.token_ids == plain
        draft = done.stats.levels[0]
        assert kind != "said" or draft.num_accepted_tokens > 16
        assert len(prompt) == 400 or len(kind) < 4 or kind == "said" or draft.acceptance_rate == 1


@pytest.mark.parametrize("layers", [[0, 3], [4], [1, 2, 4], [0, 1, 2, 3, 4]])
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


@pytest.mark.parametrize("num_kept", [3, 2])
def test_layers_are_removed_by_what_they_are_missed(deep, num_kept):
    """By hand: the choice of three, then of two of those, that overlap most with all four."""
    ids = deep.tokenizer.encode(" ".join(SENTENCES * 20))[: 2 * WINDOW]
    windows = [ids[:WINDOW], ids[WINDOW:]]

    def probs(layers: list[int]) -> torch.Tensor:
        view = with_layers(deep.model, layers)
        logits = [fresh_read(view, window)[1][-NUM_SCORED:] for window in windows]
        return (torch.cat(logits) / 0.6).softmax(1)

    kept = [0, 1, 2, 3]
    all_probs = probs(kept)
    while len(kept) > num_kept:
        choices = map(list, itertools.combinations(kept, len(kept) - 1))
        kept = max(choices, key=lambda it: float(torch.minimum(probs(it), all_probs).sum()))
    assert least_missed(deep.model, ids, num_kept / 4) == kept
    with pytest.raises(InputError, match="128 or more"):
        least_missed(deep.model, [1] * 127, 0.5)
