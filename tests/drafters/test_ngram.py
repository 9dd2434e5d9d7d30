"""Lookup of the last words in the text: what it finds, and that its distribution says just that."""

from __future__ import annotations

import pytest
import torch

from minitri.decoding.stats import LevelStats
from minitri.drafters.ngram import LONGEST, SHORTEST, NgramDrafter
from minitri.settings import StepPlan
from tests.conftest import CPU
from tests.exactness import ScheduledTuner

V = 30


def new_drafter(*histories: list[int], num_guesses: int = 3) -> NgramDrafter:
    drafter = NgramDrafter(
        len(histories), LevelStats("draft"), ScheduledTuner([StepPlan("naive", num_guesses)]),
        vocab_size=V, device=CPU,
    )  # fmt: skip
    drafter.gamma = num_guesses
    drafter.prepare([list(history) for history in histories], [True] * len(histories))
    return drafter


def guess(history, suffix=(), **settings) -> list[int]:
    return new_drafter(history, **settings).propose([[*history, *suffix]], [True]).tokens[0]


def reference(history: list[int], sequence: list[int], num_guesses: int) -> list[int]:
    """Longest suffix first, then from the back, whole guesses first: the loop that the tensors
    stand for."""
    for n in range(LONGEST, SHORTEST - 1, -1):
        starts = [
            start
            for start in range(len(history) - n)
            if history[start : start + n] == sequence[-n:]
        ]
        whole = [start for start in starts if start + n + num_guesses <= len(history)]
        if starts and len(sequence) >= n:
            best = (whole or starts)[-1]
            return history[best + n : best + n + num_guesses]
    return []


def test_what_followed_the_last_words_is_guessed():
    assert guess([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5]
    assert guess([1, 2, 3, 4, 5, 9, 1, 2], num_guesses=1) == [3]


def test_the_longest_match_wins_over_a_later_one():
    assert guess([1, 2, 3, 4, 10, 11, 12, 7, 3, 4, 20, 21, 22, 1, 2, 3, 4]) == [10, 11, 12]
    assert guess([2, 3, 4, 10, 11, 12, 7, 3, 4, 20, 21, 22, 2, 3, 4]) == [10, 11, 12]


def test_the_latest_of_equal_matches_wins():
    assert guess([3, 4, 10, 11, 12, 3, 4, 20, 21, 22, 3, 4]) == [20, 21, 22]


def test_a_place_with_enough_tokens_behind_it_wins_over_a_later_one():
    """A loop matches itself right at the end of the text, where next to nothing follows."""
    assert guess([6] * 12) == [6, 6, 6]
    assert guess([1, 2, 7, 8, 9, 1, 2, 5, 1, 2]) == [5, 1, 2]
    assert guess([1, 2, 7, 8, 9, 1, 2, 5, 2, 1, 2], num_guesses=5) == [7, 8, 9, 1, 2]


def test_more_than_the_longest_match_counts_for_nothing():
    """The earlier place agrees in five tokens, the later one in four: the later one wins."""
    assert guess([5, 1, 2, 3, 4, 10, 11, 12, 6, 1, 2, 3, 4, 20, 21, 22, 5, 1, 2, 3, 4]) == [
        20,
        21,
        22,
    ]


@pytest.mark.parametrize(
    "history", [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 2], [7, 3, 8, 3]]
)
def test_nothing_is_guessed_where_nothing_matches(history):
    """One token in common, as in the last two, is not enough."""
    proposal = new_drafter(history).propose([history], [True])
    assert proposal.tokens == [[]]
    assert proposal.origins == [[]]
    assert proposal.counts == [0]
    assert proposal.probs_BNV.shape == (1, 0, V)


def test_guesses_end_where_the_history_ends():
    assert guess([1, 2, 3, 1, 2], num_guesses=5) == [3, 1, 2]
    assert guess([1, 2, 1, 2], num_guesses=5) == [1, 2]
    assert guess([6, 6, 6], num_guesses=5) == [6]


def test_a_match_must_be_followed_by_something():
    """The last tokens match themselves, which is not an occurrence; nor is one that the history
    ends with."""
    assert guess([1, 2, 3, 4]) == []
    assert guess([7, 8, 1, 2], suffix=[1, 2]) == []


def test_guesses_of_higher_stages_are_words_to_look_up_and_never_a_source():
    history = [1, 2, 3, 4, 5, 6]
    assert guess(history, suffix=[2, 3]) == [4, 5, 6]  # the match is behind the certain tokens
    assert guess(history, suffix=[9, 8, 7, 9, 8]) == []  # 9, 8, 7 stands only among guesses
    assert guess([*history, 9], suffix=[8, 7, 9, 8]) == []


def test_the_sequences_are_left_as_they_were():
    sequences = [[1, 2, 3, 1, 2], [4]]
    new_drafter(*sequences).propose(sequences, [True, True])
    assert sequences == [[1, 2, 3, 1, 2], [4]]


def test_preparing_adds_only_what_is_new_and_cropping_takes_nothing():
    drafter = new_drafter([1, 2, 3])
    drafter.prepare([[1, 2, 3, 4, 1, 2]], [True])
    drafter.crop([2])
    assert drafter.propose([[1, 2, 3, 4, 1, 2]], [True]).tokens == [[3, 4, 1]]
    assert drafter.propose([[1, 2, 3, 4, 1, 2, 3, 4]], [True]).tokens == [[1, 2]]


def test_ragged_rows_look_each_into_its_own_text():
    rows = [[1, 2, 3, 1, 2], [1, 2, 9, 8, 7, 6, 1, 2], [5], [1, 2, 4, 1, 2]]
    proposal = new_drafter(*rows).propose(rows, [True, True, True, False])
    assert proposal.tokens == [[3, 1, 2], [9, 8, 7], [], []]
    assert proposal.origins == [["draft"] * 3, ["draft"] * 3, [], []]


def test_the_distribution_is_one_hot_on_the_tokens():
    rows = [[1, 2, 3, 1, 2], [5], [6, 6, 6]]
    proposal = new_drafter(*rows).propose(rows, [True] * 3)
    assert proposal.counts == [3, 0, 1]
    for b, tokens in enumerate(proposal.tokens):
        wanted = torch.zeros(len(tokens), V)
        for i, token in enumerate(tokens):
            wanted[i, token] = 1
        assert torch.equal(proposal.probs_BNV[b, : len(tokens)], wanted)


@pytest.mark.parametrize("seed", range(8))
def test_random_texts_agree_with_the_plain_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(2 + seed % 3, (60,), generator=generator).tolist()
    found = 0
    for end in range(1, 50):
        for num_unverified in (0, 1, 4):
            sequence = text[: end + num_unverified]
            guessed = new_drafter(text[:end]).propose([sequence], [True]).tokens[0]
            assert guessed == reference(text[:end], sequence, 3)
            found += bool(guessed)
    assert 50 < found < 147
