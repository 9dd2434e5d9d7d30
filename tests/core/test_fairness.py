"""Whose prompt is read, who gets a place and who decodes next, in an open run without a model."""

from collections.abc import Iterator

import pytest

from minitri.core.requests import Request, RequestState
from minitri.core.scheduler import Scheduler
from minitri.core.settings import GenerationConfig, SamplingParams, SpeculationConfig
from minitri.core.shape import MemoryShape

CHUNK = 8


class Run:
    """Events of requests (read, token, end) with their numbers; each step gives each a token."""

    def __init__(self, num_rows: int = 4) -> None:
        generation = GenerationConfig(shared_chunk=CHUNK)
        settings = SamplingParams(), generation, SpeculationConfig()
        shape = MemoryShape((1,) * num_rows, *settings)
        self.scheduler = Scheduler([], shape, is_open=True)
        self.active = [False] * num_rows
        self.num_left: list[int] = []  # of tokens, by request
        self.events = self.turns()

    def ask(self, num_prompt: int, num_new: int = 4, client: str = "") -> int:
        number = len(self.num_left)
        self.num_left.append(num_new)
        self.scheduler.add(RequestState(number, Request([5], client=client), [5] * num_prompt))
        return number

    def until(self, kind: str, number: int) -> list[tuple[str, int]]:
        """The events up to this one."""
        events = [next(self.events)]
        while events[-1] != (kind, number):
            events.append(next(self.events))
        return events

    def turns(self) -> Iterator[tuple[str, int]]:
        while True:
            while (request := self.scheduler.next_request()) is not None:
                self.scheduler.admit(self.scheduler.free_rows[0], request)
            can_decode = any(self.active)
            if (b := self.scheduler.next_to_read()) is not None:
                size = CHUNK if can_decode else 4 * CHUNK
                self.scheduler.note_read(b, max(self.scheduler.unread[b] - size, 0))
                yield "read", self.scheduler.admitted[b].number
            yield from self.emit(self.scheduler.ready(self.active))
            if can_decode:
                yield from self.emit([b for b, on in enumerate(self.active) if on])

    def emit(self, rows: list[int]) -> Iterator[tuple[str, int]]:
        for b in rows:
            number = self.scheduler.admitted[b].number
            yield "token", number
            self.num_left[number] -= 1
            self.active[b] = self.num_left[number] > 0
            if not self.active[b]:
                self.scheduler.remove(b)
                yield "end", number


@pytest.mark.parametrize(("num_long", "num_chunks"), [(1, 1), (1, 2), (1, 4), (6, 1)])
def test_a_short_prompt_waits_for_two_chunks_of_long_ones_at_most(num_long, num_chunks):
    """Long prompts take half of the places, so a short one finds another."""
    run = Run()
    long = [run.ask(350) for _ in range(num_long)]
    for _ in range(num_chunks):
        run.until("read", long[0])
    before = run.until("token", run.ask(5))
    assert sum(number in long for _, number in before) <= 2
    assert len(run.scheduler.unread) <= 2


def test_a_long_prompt_is_read_though_short_ones_never_end():
    run = Run()
    long, seen = run.ask(300), []
    while ("token", long) not in seen:
        seen += run.until("end", run.ask(20, 1))
        assert len(run.num_left) < 60


def test_short_prompts_come_before_longer_ones_but_not_always():
    """Every fourth place is for the one that has waited longest."""
    run = Run()
    talking = [run.ask(3, 200) for _ in range(3)]
    run.until("token", talking[-1])
    for _ in range(2):
        run.until("token", run.ask(4, 12))
    long = run.ask(100)
    short = [run.ask(4, 12) for _ in range(20)]
    before = {number for _, number in run.until("read", long)}
    assert len(before.intersection(short)) == 3


def test_the_client_with_fewest_rows_is_next():
    run = Run()
    first = [run.ask(3, 30, "many") for _ in range(6)]
    other = run.ask(3, 30, "few")
    assert {number for _, number in run.until("end", first[0])} == {*first[:3], other}


def num_answers_before(run: Run, clients: dict[int, str], awaited: set[int]) -> int:
    """Each answered request of `clients` comes again an event later, until all that are awaited
    have begun: the number of answers until then, at most 100."""
    num_answered, client = 0, None
    while awaited and num_answered < 100:
        kind, number = next(run.events)
        awaited.discard(number)
        if client is not None:
            clients[run.ask(4, 2, client)] = client
        client = clients.pop(number, None) if kind == "end" else None
        num_answered += client is not None
    return num_answered


def test_clients_that_come_again_do_not_overtake_one_that_waits():
    """Clients that have nothing open for a moment are forgotten."""
    run = Run(1)
    run.ask(4, 2, "a")
    second = run.ask(4, 2, "a")
    others = {run.ask(4, 2, client): client for client in "bc"}
    assert num_answers_before(run, others, {second}) <= 4
    run.until("end", run.ask(4, 2, "d"))
    assert len(run.scheduler.latest_admissions) <= 3


def test_every_client_s_long_prompt_gets_its_turn_among_its_short_ones():
    run = Run(1)
    short = {run.ask(4, 2, client): client for client in "abab"}
    long = {run.ask(100, 2, client) for client in "ab"}
    assert num_answers_before(run, short, long) <= 20
