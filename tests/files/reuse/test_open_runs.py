"""Runs that stay open: requests come and go, and none depends on another."""

import itertools

import pytest

from minitri import GenerationConfig, Idle, Request, SamplingParams, SpeculationConfig, Token
from tests.cascades import ends_of
from tests.core.rigs import random_prompt
from tests.files.refused import refused

SIZES = {"gamma1": 2, "gamma2": 3, "budget": 32, "num_recent_tokens": 16}
TRIFORCE = SpeculationConfig("triforce", **SIZES)


def start(engine, batch_size=2, reserve=128, speculation=TRIFORCE):
    generation = GenerationConfig(reserve=reserve, prefill_chunk=16)
    return engine.open(batch_size=batch_size, generation=generation, speculation=speculation)


def request(engine, number: int) -> Request:
    prompt = random_prompt(engine.config, 20 + 9 * number, seed=number)
    sampling = (SamplingParams(), SamplingParams(0.9, 30))[number % 2]
    return Request(prompt, number, sampling, GenerationConfig(12, ignore_eos=True))


def until_idle(run) -> list:
    return list(itertools.takewhile(lambda event: not isinstance(event, Idle), run))


def alone(engine, wanted: Request, speculation=TRIFORCE) -> tuple[int, ...]:
    engine.release()
    return ends_of(engine.stream([wanted], speculation=speculation))[0].token_ids


def test_requests_that_come_later_get_what_they_get_alone(engine):
    wanted, ends = [request(engine, number) for number in range(6)], []
    with start(engine) as run:
        assert isinstance(next(run), Idle)
        for first in (0, 3):
            numbers = [run.submit(each) for each in wanted[first : first + 3]]
            assert numbers == [first, first + 1, first + 2]
            ends += ends_of(until_idle(run))
    for asked, end in zip(wanted, ends, strict=True):
        assert end.token_ids == alone(engine, asked)
        assert end.row_stats.num_prompt_tokens == len(asked.prompt)
        assert end.row_stats.num_generated_tokens == sum(end.row_stats.by_origin.values()) == 12


def test_a_cancelled_request_says_no_more_and_its_row_is_free(engine):
    """Whether it runs or waits."""
    with start(engine, batch_size=1) as run:
        first, second, third = (run.submit(request(engine, number)) for number in range(3))
        tokens = (event for event in run if isinstance(event, Token))
        assert [event.row for event in itertools.islice(tokens, 3)] == [first] * 3
        run.cancel(first)
        run.cancel(second)
        events = until_idle(run)
    assert [event.row for event in events if isinstance(event, Token)] == [third] * 12
    assert [end.row for end in ends_of(events)] == [third]


def test_a_prompt_that_is_cancelled_is_read_no_further(engine):
    with start(engine, batch_size=1) as run:
        number = run.submit(request(engine, 8))
        assert next(run).num_done == 16
        run.cancel(number)
        assert isinstance(next(run), Idle)
    assert len(engine.held_tokens) == 16


def test_what_is_wrong_is_said_and_the_run_goes_on(engine):
    with start(engine) as run:
        with refused("max_new_tokens"):
            run.submit(Request([1] * 120))
        number = run.submit(request(engine, 1))
        assert [end.row for end in ends_of(until_idle(run))] == [number]
    with engine.generate("fine") as closed, refused("no more requests"):
        closed.submit(request(engine, 1))
    with engine.open(batch_size=1) as run:
        assert run.shape.generation.reserve == engine.config.context_length
    for reserve in (0, 1, 10**6):
        with refused(f"reserve is {reserve} tokens"):
            start(engine, reserve=reserve)


@pytest.mark.parametrize(("method", "tree"), [("naive", "3"), ("triforce", "2x2")])
def test_rows_that_never_had_a_text_change_none(engine, method, tree):
    speculation = SpeculationConfig(method, tree=tree, budget=32, num_recent_tokens=16)
    wanted = request(engine, 0)
    with start(engine, 3, speculation=speculation) as run:
        run.submit(wanted)
        [end] = ends_of(until_idle(run))
    assert end.token_ids == alone(engine, wanted, speculation)


def test_a_run_closed_before_its_first_event_gives_the_text_before_it_back(engine):
    engine.complete([3] * 50, generation=GenerationConfig(5, ignore_eos=True))
    held = engine.held_tokens
    engine.generate([4] * 30).close()
    assert engine.held_tokens == held != []
