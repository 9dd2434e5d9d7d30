"""Lookup of the last words in the text: what it finds, how much of it it guesses, and learns."""

from types import SimpleNamespace

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from minitri.core.drafters.lookup import LONGEST, GrowingText, LookupDrafter
from minitri.core.settings import StepPlan
from minitri.core.stats import Clock, Meter, Stats
from tests.core.exactness import ScheduledTuner
from tests.core.rigs import CPU

V = 30
WORDS = st.lists(st.integers(0, 2), max_size=60) | st.lists(st.integers(0, 20), max_size=60)


def new_drafter(*texts: list[int], num_guesses: int = 3) -> LookupDrafter:
    meter = Meter(Stats(), ScheduledTuner([StepPlan("naive", num_guesses)]), Clock())
    target = SimpleNamespace(
        sampling=texts, passes=SimpleNamespace(vocab_size=V), model=SimpleNamespace(device=CPU)
    )
    drafter = LookupDrafter(meter, target)
    drafter.gamma = num_guesses
    drafter.prepare([list(text) for text in texts], [True] * len(texts))
    return drafter


def found(text, in_flight=(), limit=5) -> tuple[int, list[int]]:
    """A lookup in a text that grew in two pieces."""
    growing, half = GrowingText(), len(text) // 2
    for piece in (text[:half], text[half:]):
        growing.extend(piece)
    return growing.lookup([*text, *in_flight], limit)


def brute_force(text: list[int], sequence: list[int], limit: int) -> tuple[int, list[int]]:
    """The definition: every earlier place; then what follows it in the text as it is extended."""
    best, end = 1, 0
    for place in range(1, len(text) - 1):
        length = 0
        while length <= min(place, len(sequence) - 1, LONGEST - 1):
            if text[place - length] != sequence[-1 - length]:
                break
            length += 1
        if length > 1 and length >= best:
            best, end = length, place + 1
    if not end:
        return 0, []
    longer = list(sequence)
    for i in range(limit):
        longer.append(longer[end + i])
    return best, longer[len(sequence) :]


@given(WORDS, st.lists(st.integers(0, 2), max_size=5), st.integers(1, 9))
@example([5, *range(1, 5), 10, 11, 12, 6, *range(1, 5), 20, 5, *range(1, 5)], [], 3)
@example([*range(100, 160), 7, *range(100, 160)], [], 1)
@example([6] * 500, [], 3)
def test_the_latest_of_the_longest_matches_is_found(text, in_flight, limit):
    assert found(text, in_flight, limit) == brute_force(text, [*text, *in_flight], limit)


def test_rejected_guesses_are_never_learnt():
    """Guesses in flight are words to look up; what was rejected leaves nothing over."""
    drafter = new_drafter([1, 2, 3, 4, 5])
    assert drafter.propose([[1, 2, 3, 4, 5, 9, 8, 7]], [True]).tokens == [[]]
    assert drafter.propose([[1, 2, 3, 4, 5, 9, 8, 7, 9, 8]], [True]).tokens == [[]]
    assert drafter.propose([[1, 2, 3, 4, 5, 2, 3]], [True]).tokens == [[4, 5, 2]]
    drafter.crop([5])
    drafter.prepare([[1, 2, 3, 4, 5, 6, 9, 8]], [True])
    assert drafter.propose([[1, 2, 3, 4, 5, 6, 9, 8]], [True]).tokens == [[]]


def test_rows_look_each_into_its_own_text_until_it_ends_and_leave_it_as_it_was():
    """What they guess has one-hot distributions."""
    rows = [[1, 2, 3, 1, 2], [1, 2, 9, 8, 7, 6, 1, 2], [5, 1, 2], [1, 2, 4, 1, 2]]
    before = [[*row] for row in rows]
    drafter = new_drafter(*rows)
    proposal = drafter.propose(rows, [True, True, True, False])
    assert proposal.tokens == [[3, 1, 2], [9, 8, 7], [], []]
    assert proposal.origins == [["draft"] * 3, ["draft"] * 3, [], []]
    for b, tokens in enumerate(proposal.tokens):
        wanted = torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.int64), V)
        assert torch.equal(proposal.probs_BNV[b, : len(tokens)], wanted.float())
    assert rows == before
    drafter.reset(0)
    rows[0] = [9, 1, 2]
    drafter.prepare(rows, [True] * 4)
    assert drafter.propose(rows, [True] * 4).tokens == [[], [9, 8, 7], [], [4, 1, 2]]


def test_a_long_match_and_past_success_allow_more_guesses():
    def num_guesses(text, *endings) -> int:
        """Guesses after a text, and ten matches that were followed by these in turns."""
        drafter, sequence = new_drafter(text, num_guesses=64), list(text)
        for i, ending in enumerate(endings):
            drafter.propose([sequence], [True])
            sequence += [*ending, 10 + i, *text[-2:]]
            drafter.prepare([sequence], [True])
        return len(drafter.propose([sequence], [True]).tokens[0])

    short, long = [1, 2, 3, 8, 4, 1, 2], [*range(3, 23), 1, *range(3, 23)]
    assert 1 <= num_guesses(short) < num_guesses(long) < 64
    assert num_guesses(short, *[[21], [22]] * 5) == 1
    assert num_guesses(short) < num_guesses(short, *[[3, 8]] * 10)
