"""Prefix reuse, and runs that stay open: no text depends on those before it or next to it."""

import functools
import itertools

import pytest

from minitri import GenerationConfig, Idle, Request, SamplingParams, SpeculationConfig
from minitri.core.caches.full import FullCache
from minitri.core.requests import End, Token
from tests.conftest import ends_of, tiny_engine
from tests.core.rigs import policy_of, random_prompt
from tests.devices.gpu_twins.conftest import offloaded

WARM = SamplingParams(0.9, 30)
SIZES = {"budget": 32, "num_recent_tokens": 16, "observation_window": 4}
TRIFORCE = SpeculationConfig("triforce", gamma1=2, gamma2=3, **SIZES)


def say(engine, prompts, speculation=TRIFORCE, num_new=12, sampling=WARM, seed=0, **settings):
    """Texts of a run, and how many tokens of each prompt were not read."""
    generation = GenerationConfig(num_new, ignore_eos=True, prefill_chunk=16, **settings)
    how = {"sampling": sampling, "generation": generation, "speculation": speculation}
    ends = ends_of(engine.generate(prompts, seed=seed, **how))
    return [list(end.token_ids) for end in ends], [e.row_stats.num_cached_tokens for e in ends]


def fresh(engine, *arguments, **settings):
    """Texts of a run of an engine that holds no text."""
    engine.release()
    return say(engine, *arguments, **settings)


@pytest.fixture(scope="module")
def document(engine):
    return random_prompt(engine.config, 150, seed=1)


@pytest.mark.parametrize(
    ("method", "policy", "window"),
    [
        ("autoregressive", "retrieval", 0),
        ("auto", "retrieval", 4),
        ("triforce", "received", 1000),  # a policy that must see all queries of a prompt
    ],
)
def test_a_second_question_gets_the_answer_of_a_fresh_run(engine, document, method, policy, window):
    speculation = SpeculationConfig(method, policy=policy_of(policy), **SIZES)
    first, cached = fresh(engine, [document], speculation)
    assert cached == [0]
    for prompt, least, most in (
        ([*document, *first[0], 9, 8, 7], 149, 162),
        (document[:90], 89 - window, 89),
        ([*document[:60], *document[90:]], 60, 61),
    ):
        again, cached = say(engine, [prompt], speculation, seed=4)
        assert fresh(engine, [prompt], speculation, seed=4) == (again, [0])
        assert cached == [0] if window == 1000 else least <= cached[0] <= most
        say(engine, [document], speculation)


@pytest.mark.parametrize(
    ("num_other", "length", "num_rows", "num_cached"), [(30, 150, 3, 145), (100, 60, 4, 55)]
)
def test_idle_rows_are_restored(engine, document, num_other, length, num_rows, num_cached):
    """Idle rows come back in any place, though passes of others wrote to their first slots."""
    before, after = (random_prompt(engine.config, n, seed=n) for n in (40, 200))
    prompt = document[:length]  # if short, too short to take the place of the first
    texts = ((before, num_other), (document, 2), (after, 50), (prompt, 8))
    requests = [Request(text, 0, WARM, max_new_tokens=n, ignore_eos=True) for text, n in texts]
    engine.release()
    generation = GenerationConfig(reserve=256, shared_chunk=256)
    with engine.open(generation=generation, speculation=TRIFORCE, batch_size=num_rows) as run:
        for request in requests[:3]:
            run.submit(request)
        tokens = (event for event in run if isinstance(event, Token))
        next(itertools.islice(tokens, 19, None))
        number = run.submit(requests[3])
        end = next(event for event in run if isinstance(event, End) and event.row == number)
    assert end.row_stats.num_cached_tokens >= num_cached
    assert fresh(engine, [prompt], TRIFORCE, 8)[0] == [list(end.token_ids)]


def interrupt(engine, document, monkeypatch, **settings):
    """A run that ends by Ctrl-C in a step: guesses and rejected tokens are in the caches."""
    how = {"generation": GenerationConfig(30, ignore_eos=True, **settings), "sampling": WARM}
    run = engine.generate(document, speculation=TRIFORCE, seed=2, **how)
    next(event for event in run if isinstance(event, Token))
    real = FullCache.crop

    def crop(cache, lengths):
        if cache.lengths > lengths:
            raise KeyboardInterrupt
        real(cache, lengths)

    with monkeypatch.context() as patching:
        patching.setattr(FullCache, "crop", crop)
        with pytest.raises(KeyboardInterrupt):
            list(run)


def test_ctrl_c_in_the_middle_of_a_step_loses_nothing_that_was_certain(
    engine, document, monkeypatch
):
    engine.release()
    interrupt(engine, document, monkeypatch)
    prompt = [*engine.held_tokens, *range(20)]  # the last are always read
    assert prompt[:149] == document[:149]
    again, cached = say(engine, [prompt])
    assert cached[0] > 140
    assert fresh(engine, [prompt])[0] == again


def test_a_cache_in_host_memory_serves_too_but_not_after_ctrl_c_in_a_step(monkeypatch):
    """After which buffers and ring may be half written. The document is longer than the ring."""
    engine, settings = tiny_engine(), {"offload": True, "on_chip": 1}
    full = functools.partial(offloaded, 1, batch_size=2, config=engine.config)
    monkeypatch.setattr("minitri.core.memory.allocate_full_cache", lambda *_: full())
    document = random_prompt(engine.config, 200, seed=1)
    say(engine, [document, document[:50]], **settings)
    prompts = [[*document, 5, 6], [*document, 7]]
    again, cached = say(engine, prompts, **settings)
    assert cached == [197, 196]
    interrupt(engine, prompts, monkeypatch, **settings)
    assert engine.held_tokens == []
    assert say(engine, prompts, **settings) == (again, [0, 196])


def test_a_cancelled_request_says_no_more_and_its_row_is_free(engine):
    """Whether it runs or waits; if its prompt is being read, no more of that is."""

    def ask(length: int) -> int:
        prompt = random_prompt(engine.config, length, seed=length)
        return run.submit(Request(prompt, 0, WARM, max_new_tokens=12, ignore_eos=True))

    how = {"reserve": 128, "prefill_chunk": 16, "method": "triforce", "tree": "2x2", **SIZES}
    with engine.open(batch_size=1, **how) as run:
        first, second, third = map(ask, (20, 29, 38))
        tokens = (event for event in run if isinstance(event, Token))
        assert [event.row for event in itertools.islice(tokens, 3)] == [first] * 3
        run.cancel(first)
        run.cancel(second)
        events = [*itertools.takewhile(lambda event: not isinstance(event, Idle), run)]
        fourth = ask(92)
        assert next(run).num_done == 16
        run.cancel(fourth)
        assert isinstance(next(run), Idle)
    assert len(engine.held_tokens) == 16
    assert [event.row for event in events if isinstance(event, Token)] == [third] * 12
    assert [end.row for end in ends_of(events)] == [third]
    assert {event.row for event in events} == {third}  # nor is the second one's prompt read
