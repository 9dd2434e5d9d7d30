"""The engine's promises: the same tokens however they are asked for, whatever ran next to them or
before them, and what it refuses."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import minitri
from minitri import End, InputError, Request, SamplingParams, SpeculationConfig, Token
from minitri.core.requests import PrefillProgress
from minitri.core.runner import ModelRunner
from tests.conftest import load, texts_of

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
    """The other row goes on while the new prompt is read, chunk by chunk."""
    prompt = list(range(60))
    texts = ((prompt[:5], 2), (prompt[:5], 40), (prompt, 2))
    wanted = [Request(text, max_new_tokens=n, ignore_eos=True) for text, n in texts]
    run = engine.stream(wanted, batch_size=2, speculation=False, prefill_chunk=10)
    order = [(type(event).__name__, event.row) for event in run]
    assert [row for name, row in order if name == "End"] == [0, 2, 1]
    others = [place for place in order if place[1]]
    first = others.index(("PrefillProgress", 2))
    assert others[first : first + 6] == [("PrefillProgress", 2), ("Token", 1)] * 3


@pytest.mark.parametrize(("seconds", "most"), [(0.01, 64), (0.5, 16)])
def test_where_requests_may_come_a_prompt_is_read_in_chunks_of_a_second(
    engine, monkeypatch, seconds, most
):
    """A clock is later by `seconds` whenever it is read."""
    monkeypatch.setattr("time.perf_counter", itertools.count(0, seconds).__next__)
    engine.release()
    with engine.open(reserve=400, prefill_chunk=64, shared_chunk=8) as run:
        run.submit(Request(list(range(300)), max_new_tokens=1))
        events = itertools.takewhile(lambda event: not isinstance(event, End), run)
        done = [event.num_done for event in events if isinstance(event, PrefillProgress)]
    assert max(np.diff([0, *done])) == most


@pytest.mark.parametrize("method", METHODS)
def test_rows_without_a_text_are_in_no_pass(engine, method, monkeypatch):
    """Wherever the only text stands: the first place still holds a text that has ended."""
    sizes = set()
    plain = ModelRunner.unread

    def unread(runner, sequences, active):
        sizes.add(len(sequences))
        return plain(runner, sequences, active)

    with engine.open(batch_size=4, reserve=200, method=method, **SIZES) as run:
        for prompt, num_new in (([1, 2, 3], 2), ([7, 8, 9] * 20, 60)):
            run.submit(Request(prompt, 5, WARM, max_new_tokens=num_new, ignore_eos=True))
        while not isinstance(next(run), End):
            pass
        monkeypatch.setattr(ModelRunner, "unread", unread)
        while not isinstance(next(run), End):
            pass
    assert sizes == {1}


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


PROMPTS = [[5, 6, 7], list(range(10, 60)), [9], [4] * 20]


def texts(engine, prompts, *, n=12, **settings):
    return texts_of(engine.generate(prompts, max_new_tokens=n, speculation=False, **settings))


def test_ids_are_one_prompt_in_any_form_and_seeds_decide_and_belong_to_rows(engine):
    ids = PROMPTS[1]
    for given in (torch.tensor(ids), np.array([ids])):
        assert texts(engine, given) == texts(engine, ids)
    same = texts(engine, [PROMPTS[0]] * 3, sampling=WARM, seed=5)
    assert len(set(same)) == 3
    assert same == texts(engine, [PROMPTS[0]] * 3, sampling=WARM, seed=[5, 6, 7])
    assert texts(engine, PROMPTS[0], sampling=WARM, seed=np.int64(6)) == [same[1]]


STRETCH = "or stretch the context with rope_scaling=yarn:2"
REFUSED = [  # a method, what it is given, settings, and what the error says
    ("stream", [], {}, "no requests"),
    ("stream", ["fine"], {}, "'fine'; give a Request"),
    ("stream", [Request("fine"), Request("")], {}, "request 1: .*empty"),
    ("stream", [Request("fine"), Request([5] * 600)], {}, "request 1: the prompt has 600 tokens"),
    ("stream", [Request("fine"), Request("fine", seed=-1)], {}, "request 1: seed is .-1"),
    ("stream", [Request("fine")], {"top_p": 1}, "top_p .* of a run; give it to each .*Request"),
    ("generate", "x", {"max_tokens": 1}, "max_tokens is not .* did you mean max_new_tokens"),
    ("generate", "x", {"do_sample": 1}, "do_sample is not a setting; there are temperature, top_k"),
    ("complete", "x", {"gamma1": 2, "speculation": False}, "gamma1 is .*with speculation=False"),
    ("complete", [7] * 501, {"max_new_tokens": 12}, f"^the prompt .* 500 tokens {STRETCH}"),
    ("complete", [7] * 20, {"max_new_tokens": 512}, f"lower max_new_tokens= {STRETCH}"),
    ("complete", [7] * 20, {"max_new_tokens": 10**9}, "lower max_new_tokens=$"),
]
NO_PROMPTS = [5, None, True, {"a": 1}, {3, 4}, torch.tensor(3), Path("x"), b"She had", [None]]
NO_PROMPTS += [["a", 3], [1.5], [True, 5], "a\udcff", "", [], [[]], ["fine", ""], [3, 320], [[-1]]]
WRONG = {
    "method": ["triforc", None],
    "policy": ["lru", ["h2o"], object()],
    "tree": ["0", "4x", "65", "8x9", "4 x 3", 16, "9" * 99],
    "gamma1": [0, 2.0, "3", True],
    "budget": [7.5, 12],
    "temperature": [1e-9, math.nan, "1", None, True],
    "logit_bias": [{-1: 1}, {1.5: 1}, {1: 101}, {1: math.nan}, [1], {"a": 1}, 5],
    "bad_words": [("",), 3, ("\ud800",)],
    "grammar": ["x", {}],
    "max_new_tokens": [8.0, None],
    "stop": [("",), ("\ud800",), (3,), 3, {"END"}],
    "offload": [1],
    "seed": [-1, 2**32, [1], [1, 2, 3], [0, None], 1.5, True, [1, True]],
}
REFUSED += [("generate", prompt, {}, "prompt") for prompt in NO_PROMPTS]
REFUSED += [("generate", PROMPTS[:2], {it: value}, it) for it in WRONG for value in WRONG[it]]
KINDS = ("sampling", "generation", "speculation")
REFUSED += [("generate", "x", {kind: "triforce"}, r"'triforce'; give a \w+") for kind in KINDS]
REFUSED += [("stream", [Request("x")], {"batch_size": it}, "batch_size") for it in (0, "2", 1.5)]


@pytest.mark.parametrize(("method", "given", "settings", "message"), REFUSED)
def test_what_is_wrong_is_named_before_any_work(engine, method, given, settings, message):
    with pytest.raises(InputError, match=message):
        getattr(engine, method)(given, **settings)


@pytest.mark.parametrize("settings", [{"budget": 10**20, "chunk_size": 1}, {"chunk_size": 1024}])
def test_a_budget_beyond_all_measure_is_clipped(engine, settings):
    """Clipped to what the texts can fill; no more memory is reserved than for them."""
    speculation = SpeculationConfig("retrieval", **settings)
    how = {"max_new_tokens": 4, "ignore_eos": True, "speculation": speculation}
    end = engine.complete(PROMPTS[0], **how)
    assert [end.token_ids] == texts(engine, PROMPTS[0], n=4, ignore_eos=True)
    assert end.stats.kv_cache_bytes < 1 << 20


BAD = {"model": [None], "draft": [3], "dtype": [torch.float32, "int3"]}
BAD |= {"rope_scaling": [4, "magic"], "device": [Path("cpu"), "abacus", "mps", "cuda:99"]}


@pytest.mark.parametrize(("name", "value"), [(name, it) for name in BAD for it in BAD[name]])
def test_bad_settings_of_load_are_refused(folder, name, value):
    with pytest.raises(InputError, match=value if isinstance(value, str) else f"^{name} is"):
        minitri.load(**{"model": folder, name: value})


def test_a_default_drafter_that_cannot_be_had_gives_way_to_ngrams(folder, monkeypatch, caplog):
    missing = "no-such-drafter"
    monkeypatch.setattr("minitri.files.open_models.default_draft", lambda model: missing)
    engine = load(folder)
    assert engine.models.draft is None
    assert "suffix lookup takes its place" in caplog.text
    with pytest.raises(InputError, match=missing):
        load(folder, draft=missing)
