"""Runs that stay open: requests come and go, and none depends on another."""

import pytest

from minitri import (
    End,
    GenerationConfig,
    Idle,
    InputError,
    Request,
    SamplingParams,
    SpeculationConfig,
    Token,
)
from tests.cascades import random_prompt

WARM = SamplingParams(0.9, 30)
SIZES = {"gamma1": 2, "gamma2": 3, "budget": 32, "num_recent_tokens": 16}
SPECULATION = SpeculationConfig("triforce", **SIZES)


def start(engine, batch_size=2, reserve=128, speculation=SPECULATION):
    generation = GenerationConfig(reserve=reserve, prefill_chunk=16)
    return engine.open(batch_size=batch_size, generation=generation, speculation=speculation)


def request(engine, number: int, num_new: int = 12, **settings) -> Request:
    prompt = random_prompt(engine.config, 20 + 9 * number, seed=number)
    generation = GenerationConfig(num_new, ignore_eos=True)
    sampling = (SamplingParams(), WARM)[number % 2]
    return Request(prompt, seed=number, sampling=sampling, generation=generation, **settings)


def until_idle(run) -> dict[int, End]:
    ends = {}
    for event in run:
        if isinstance(event, Idle):
            return ends
        if isinstance(event, End):
            ends[event.row] = event
    raise AssertionError("an open run has ended by itself")


def alone(engine, wanted: Request, speculation=SPECULATION) -> tuple[int, ...]:
    engine.release()
    settings = {"sampling": wanted.sampling, "generation": wanted.generation}
    done = engine.complete(wanted.prompt, seed=wanted.seed, speculation=speculation, **settings)
    return done.token_ids


def test_requests_that_come_later_get_what_they_get_alone(engine):
    run, wanted = start(engine), [request(engine, number) for number in range(6)]
    assert isinstance(next(run), Idle)
    numbers = [run.submit(it) for it in wanted[:3]]
    ends = until_idle(run)
    numbers += [run.submit(it) for it in wanted[3:]]
    ends |= until_idle(run)
    run.close()
    assert numbers == [0, 1, 2, 3, 4, 5] == sorted(ends)
    for number, it in zip(numbers, wanted, strict=True):
        stats = ends[number].row_stats
        assert stats.num_prompt_tokens == len(it.prompt)
        assert stats.num_generated_tokens == sum(stats.by_origin.values()) == 12
        assert ends[number].token_ids == alone(engine, it)


def test_a_cancelled_request_says_no_more_and_its_row_is_free(engine):
    run = start(engine, batch_size=1)
    first, second, third = (run.submit(request(engine, number)) for number in range(3))
    seen = []
    for event in run:
        if isinstance(event, Token):
            seen.append(event.row)
            if seen == [first] * 3:
                run.cancel(first)
                run.cancel(second)  # which still waits
        if isinstance(event, End):
            seen.append("end")
            assert event.row == third
        if isinstance(event, Idle):
            break
    assert seen == [first] * 3 + [third] * 12 + ["end"]
    run.close()


def test_a_prompt_that_is_cancelled_is_read_no_further(engine):
    run = start(engine, batch_size=1)
    number = run.submit(request(engine, 8))
    assert next(run).num_done == 16
    run.cancel(number)
    assert isinstance(next(run), Idle)
    run.close()
    assert len(engine.held_tokens) == 16


@pytest.mark.parametrize("tree", ["", "2x2"])
@pytest.mark.parametrize("coupled", [False, True])
def test_a_request_without_speculation_stands_next_to_others(engine, coupled, tree):
    """Nothing is guessed for it."""
    speculation = SpeculationConfig("triforce", coupled=coupled, tree=tree, **SIZES)
    run = start(engine, speculation=speculation)
    wanted = [request(engine, 2 * n, speculation=n == 1) for n in range(2)]
    for it in wanted:
        run.submit(it)
    ends = until_idle(run)
    run.close()
    guessed = [{"draft", "retrieval"} & ends[n].row_stats.by_origin.keys() for n in range(2)]
    assert not guessed[0]
    assert guessed[1]
    for number, it in enumerate(wanted):
        assert ends[number].token_ids == alone(engine, it)


def test_what_is_wrong_is_said_and_the_run_goes_on(engine):
    run = start(engine)
    for wrong, message in (
        (Request([1] * 120), "max_new_tokens"),
        (Request(""), "prompt is empty"),
        (Request([5], seed=-1), "seed is -1"),
        ("hello", "'hello' where a Request"),
    ):
        with pytest.raises(InputError, match=message):
            run.submit(wrong)
    number = run.submit(request(engine, 1))
    assert list(until_idle(run)) == [number]
    run.close()
    with (
        engine.generate("fine") as closed,
        pytest.raises(InputError, match="takes no more requests"),
    ):
        closed.submit(request(engine, 1))


@pytest.mark.parametrize("reserve", [0, 1, 10**6])
def test_a_room_that_no_text_has_is_refused(engine, reserve):
    with pytest.raises(InputError, match=f"reserve is {reserve} tokens"):
        start(engine, reserve=reserve)


def test_speculation_is_chosen_per_call(engine):
    prompt = random_prompt(engine.config, 60)
    texts = []
    for settings in ({}, {"speculation": False}, {"method": "naive"}, {"method": "triforce"}):
        run = engine.generate(prompt, generation=GenerationConfig(16), **settings)
        texts.append([event.token_id for event in run if isinstance(event, Token)])
        if settings:
            chosen = settings.get("method", "autoregressive")
            assert all(plan.startswith(chosen) for plan in run.stats.steps_per_plan)
    assert texts[1:] == texts[:1] * 3


@pytest.mark.parametrize(("method", "tree"), [("naive", "3"), ("triforce", "2x2")])
def test_trees_do_not_mind_rows_that_never_had_a_text(engine, method, tree):
    speculation = SpeculationConfig(method, tree=tree, budget=32, num_recent_tokens=16)
    wanted = request(engine, 0)
    with start(engine, batch_size=3, speculation=speculation) as run:
        run.submit(wanted)
        found = until_idle(run)[0].token_ids
    assert found == alone(engine, wanted, speculation)


def test_an_open_run_has_a_retrieval_cache_for_all_that_it_reserves(engine, monkeypatch):
    """Whatever the budget of the run before it, where budgets follow prompts."""
    monkeypatch.setattr("minitri.settings.MIN_BUDGET", 16)
    speculation = SpeculationConfig("retrieval", gamma2=3, num_recent_tokens=16)
    run = engine.generate([3] * 40, speculation=speculation, generation=GenerationConfig(360))
    next(run)
    run.close()
    wanted = request(engine, 30)
    with start(engine, batch_size=1, reserve=360, speculation=speculation) as run:
        run.submit(wanted)
        found = until_idle(run)[0].token_ids
    assert found == alone(engine, wanted, speculation)


def test_a_run_closed_before_its_first_event_gives_the_text_before_it_back(engine):
    engine.complete([3] * 50, generation=GenerationConfig(5, ignore_eos=True))
    held = engine.held_tokens
    engine.generate([4] * 30).close()
    assert engine.held_tokens == held != []
