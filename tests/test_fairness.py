"""Runs that take requests: who is read, started and extended next, and whose K and V are reused."""

import itertools

import pytest

from minitri import (
    End,
    GenerationConfig,
    InputError,
    Request,
    SamplingParams,
    SpeculationConfig,
    Token,
)
from minitri.core.requests import Idle, PrefillProgress, Row
from minitri.core.scheduler import Scheduler
from minitri.core.shape import MemoryShape

CHUNK = 8


@pytest.fixture
def run(engine):
    generation = GenerationConfig(reserve=400, prefill_chunk=32, shared_chunk=CHUNK)
    with engine.open(batch_size=4, generation=generation) as run:
        yield run


def ask(run, num_prompt: int, num_new: int = 4, *, first: int = 7, **whose: str) -> int:
    prompt = [first, *(1 + i % 200 for i in range(1, num_prompt))]
    generation = GenerationConfig(num_new, ignore_eos=True)
    return run.submit(Request(prompt, generation=generation, **whose))


def until(run, kind, row: int) -> list:
    """The events up to the first of a kind of this row."""
    events = []
    while not (events and isinstance(events[-1], kind) and events[-1].row == row):
        events.append(next(run))
    return [it for it in events if not isinstance(it, Idle)]


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_a_short_prompt_waits_for_two_chunks_of_a_long_one_at_most(run, num_chunks):
    long = ask(run, 350, first=10 + num_chunks)  # else a part of it is in the cache
    for _ in range(num_chunks):
        until(run, PrefillProgress, long)
    short = ask(run, 5, first=9)
    before = until(run, Token, short)
    assert sum(event.row == long for event in before) <= 2


def test_texts_go_on_between_any_two_chunks_which_are_short_then(run):
    talking = ask(run, 3, 60)
    until(run, Token, talking)
    reading = ask(run, 200)
    order = [event.row for event in until(run, Token, reading)[:-1]]
    assert order.count(reading) >= 199 // CHUNK
    assert (reading, reading) not in itertools.pairwise(order)


def test_a_long_prompt_is_read_though_short_ones_never_end(run):
    long, seen = ask(run, 300), []
    for first in range(100):
        seen += until(run, End, ask(run, 20, 1, first=first))
        if any(isinstance(event, Token) and event.row == long for event in seen):
            break
    assert first < 99


def test_a_short_prompt_finds_a_place_though_long_ones_wait_for_more_than_there_are(run):
    long = [ask(run, 350, first=first) for first in range(20, 26)]
    until(run, PrefillProgress, long[0])
    short = ask(run, 5, first=9)
    before = until(run, Token, short)
    assert sum(event.row in long for event in before) <= 2


def test_short_prompts_come_before_longer_ones_but_not_always(run):
    """Every fourth place is for the one that has waited longest."""
    talking = [ask(run, 3, 200, first=first) for first in range(3)]
    until(run, Token, talking[-1])
    for first in (3, 4):
        until(run, Token, ask(run, 4, 12, first=first))
    long = ask(run, 100)
    short = [ask(run, 4, 12, first=first) for first in range(20)]
    before = {event.row for event in until(run, PrefillProgress, long)}
    assert 1 <= len(before.intersection(short)) <= 4


def test_the_client_with_fewest_rows_is_next(run):
    first = [ask(run, 3, 30, client="many") for _ in range(6)]
    other = ask(run, 3, 30, client="few")
    assert {event.row for event in until(run, End, first[0])} == {*first[:3], other}


def num_answers_before(narrow, clients: dict[int, str], awaited: set[int]) -> int:
    """Each answered request of `clients` comes again, until all that are awaited have begun: the
    number of answers until then, at most 100."""
    num_answered = 0
    while awaited and num_answered < 100:
        event = next(narrow)
        if isinstance(event, PrefillProgress | Token):
            awaited.discard(event.row)
        if isinstance(event, End) and event.row in clients:
            num_answered += 1
            client = clients.pop(event.row)
            clients[ask(narrow, 4, 2, client=client)] = client
    return num_answered


@pytest.fixture
def narrow(engine):
    with engine.open(batch_size=1, reserve=400) as run:
        yield run


def test_clients_that_come_again_do_not_overtake_one_that_waits(narrow):
    """They have nothing open for a moment, and are forgotten."""
    ask(narrow, 4, 2, client="a")
    second = ask(narrow, 4, 2, client="a")
    others = {ask(narrow, 4, 2, client=client): client for client in "bc"}
    assert num_answers_before(narrow, others, {second}) <= 4


def test_every_client_s_long_prompt_gets_its_turn_among_its_short_ones(narrow):
    short = {ask(narrow, 4, 2, client=client): client for client in "abab"}
    long = {ask(narrow, 100, 2, client=client) for client in "ab"}
    assert num_answers_before(narrow, short, long) <= 20


def test_a_client_that_has_gone_is_forgotten():
    shape = MemoryShape((1,), SamplingParams(), GenerationConfig(), SpeculationConfig())
    scheduler = Scheduler([], shape, is_open=True)
    for number, client in enumerate(["gone", "other"]):
        scheduler.add(Row(number, Request([5], client=client), [5]))
        scheduler.admit(0, scheduler.next_row())
        scheduler.remove(0)
    assert scheduler.turns.keys() == {"other"}


@pytest.mark.parametrize("name", ["owner", "client"])
def test_owners_and_clients_are_texts(run, name):
    with pytest.raises(InputError, match=f"{name} is .*; it must be a text"):
        run.submit(Request([1, 2], **{name: None}))


def test_no_text_begins_with_what_another_owner_left(run):
    def num_cached(owner):
        number = ask(run, 100, owner=owner)
        return until(run, End, number)[-1].row_stats.num_cached_tokens

    assert num_cached("a") == 0
    assert num_cached("b") == 0
    assert num_cached("a") > 80
    running = ask(run, 100, 60, first=11, owner="a")
    until(run, Token, running)
    other = ask(run, 100, first=11, owner="b")
    assert until(run, End, other)[-1].row_stats.num_cached_tokens == 0
