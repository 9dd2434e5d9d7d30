"""Streams of requests: a text never depends on what ran next to it, before it, or where."""

import pytest

from minitri import End, InputError, Request, SamplingParams, Token
from minitri.core.requests import PrefillProgress
from tests.cascades import texts_of

WARM = SamplingParams(temperature=0.9, top_p=0.95)
SAMPLINGS = (SamplingParams(), WARM, SamplingParams(temperature=1.3, top_k=5))
METHODS = ("autoregressive", "naive", "retrieval", "triforce")
SIZES = {"gamma1": 2, "gamma2": 3, "budget": 32, "num_recent_tokens": 8}


def requests() -> list[Request]:
    """Prompts of 1 to 70 tokens, long and short ones mixed; each ends elsewhere."""
    made = []
    for i in range(9):
        prompt = [(7 * i + 3 * j * j) % 320 for j in range(1 + (i * 23) % 70)]
        length = {"max_new_tokens": 3 + (i * 5) % 17, "ignore_eos": i % 2 == 0}
        made.append(Request(prompt, 100 + i, SAMPLINGS[i % 3], **length))
    return made


@pytest.mark.parametrize("method", METHODS)
def test_every_request_gets_what_it_gets_alone(engine, method):
    settings = {"method": method, "prefill_chunk": 16, **SIZES}
    run = engine.stream(requests(), batch_size=3, **settings)
    events = list(run)
    assert texts_of(events) == [texts_of(engine.stream([it], **settings))[0] for it in requests()]
    done = {e.row: e.num_done for e in events if isinstance(e, PrefillProgress)}
    assert done == {i: len(request.prompt) for i, request in enumerate(requests())}
    assert run.stats.num_prompt_tokens == run.stats.num_prefilled_tokens == sum(done.values())
    num_tokens = run.stats.num_generated_tokens
    assert num_tokens == sum(isinstance(event, Token) for event in events)
    assert num_tokens == run.stats.num_decoded_tokens + len(requests())


def test_a_request_that_ends_makes_room_for_the_next_at_once(engine):
    """While the new prompt is read, chunk by chunk, the other row goes on."""
    prompt = list(range(60))
    texts = ((prompt[:5], 2), (prompt[:5], 40), (prompt, 2))
    wanted = [Request(text, max_new_tokens=n, ignore_eos=True) for text, n in texts]
    run = engine.stream(wanted, batch_size=2, speculation=False, prefill_chunk=10)
    order = [(type(event).__name__, event.row) for event in run]
    assert [row for name, row in order if name == "End"] == [0, 2, 1]
    others = [place for place in order if place[1]]
    first = others.index(("PrefillProgress", 2))
    assert others[first : first + 6] == [("PrefillProgress", 2), ("Token", 1)] * 3


@pytest.mark.parametrize("method", METHODS)
def test_rows_without_a_text_are_in_no_pass(engine, method, monkeypatch):
    """Wherever the only text stands: the first place still holds a text that has ended."""
    sizes = set()

    def logits(hidden):
        sizes.add(len(hidden))
        return type(engine.model).logits(engine.model, hidden)

    with engine.open(batch_size=4, reserve=200, method=method, **SIZES) as run:
        for prompt, num_new in (([1, 2, 3], 2), ([7, 8, 9] * 20, 60)):
            run.submit(Request(prompt, 5, WARM, max_new_tokens=num_new, ignore_eos=True))
        while not isinstance(next(run), End):
            pass
        monkeypatch.setattr(engine.model, "logits", logits)
        while not isinstance(next(run), End):
            pass
    assert sizes == {1}


WRONG = [
    ([], "no requests"),
    ([Request("fine"), Request("")], "request 1: .*empty"),
    ([Request("fine"), Request([5] * 600)], "request 1: the prompt has 600 tokens"),
    ([Request("fine"), Request("fine", seed=-1)], "request 1: seed is .-1"),
    (["fine"], "'fine'; give a Request"),
]


@pytest.mark.parametrize(("wanted", "message"), WRONG)
def test_a_wrong_request_is_named(engine, wanted, message):
    with pytest.raises(InputError, match=message):
        engine.stream(wanted)


@pytest.mark.parametrize("batch_size", [0, "2", 1.5, True])
def test_a_wrong_batch_size_is_named(engine, batch_size):
    for start in (lambda **size: engine.stream([Request("fine")], **size), engine.open):
        with pytest.raises(InputError, match="batch_size"):
            start(batch_size=batch_size, reserve=64)


def test_no_text_begins_with_what_another_owner_left(engine):
    def ask(run, num_new=4, **whose) -> int:
        whose = {"max_new_tokens": num_new, "ignore_eos": True, **whose}
        return run.submit(Request([*range(40, 140)], **whose))

    def num_cached(run, owner) -> int:
        number = ask(run, owner=owner)
        while not isinstance(event := next(run), End) or event.row != number:
            pass
        return event.row_stats.num_cached_tokens

    with engine.open(batch_size=4, reserve=400) as run:
        assert num_cached(run, "a") == 0
        assert num_cached(run, "b") == 0
        assert num_cached(run, "a") > 80
        ask(run, 60, owner="c")
        while not isinstance(next(run), Token):
            pass
        assert num_cached(run, "d") == 0
        for name in ("owner", "client"):
            with pytest.raises(InputError, match=f"{name} is .*; it must be a text"):
                ask(run, **{name: None})
