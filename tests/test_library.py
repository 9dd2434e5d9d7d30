"""The library's own promises: keywords, seeds, asyncio, threads, and what an engine cannot do.
Whatever happens to the thread of asyncio's requests, nobody waits for ever."""

import asyncio
import copy
import itertools
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pydantic
import pytest
import torch

import minitri
from minitri import End, Grammar, InputError, Request
from minitri.core.model.block import read_block
from minitri.devices.cpu.build import has_kernels
from tests.conftest import tiny_engine
from tests.core.rigs import new_cache
from tests.files.test_chat_template import CHATML

WARM = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True}
COUPLED = {**WARM, "max_new_tokens": 20, "coupled": True}


@pytest.mark.skipif(not has_kernels(), reason="there is no C++ compiler here")
def test_waiting_threads_of_pytorch_leave_the_cores_to_the_kernels(monkeypatch):
    """A program that imports minitri before torch has the setting, too; a user's value stays."""
    for value, kept in (("7", "7"), (None, "1000")):
        monkeypatch.setenv("GOMP_SPINCOUNT", "7")
        if value is None:
            monkeypatch.delenv("GOMP_SPINCOUNT")
        assert minitri.load
        assert os.environ["GOMP_SPINCOUNT"] == kept


def test_keywords_say_what_settings_say(engine):
    sampling = minitri.SamplingParams(0.9, top_p=0.95)
    generation = minitri.GenerationConfig(9, stop="e", logprobs=1)
    speculation = minitri.SpeculationConfig("naive", gamma1=2)
    request = Request("She had", 3, sampling, generation)
    [wanted] = engine.stream([request], speculation=speculation).results()
    fields = {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 9, "stop": "e", "logprobs": 1}
    done = engine.complete("She had", seed=3, method="naive", gamma1=2, **fields)
    run = engine.stream([Request("She had", 3, **fields)], method="naive", gamma1=2)
    assert done.tokens == wanted.tokens == run.result().tokens
    assert {*done.stats.steps_per_plan} == {"naive gamma1 2"}


def test_results_come_in_the_order_of_the_prompts_and_only_of_whole_runs(engine):
    run = engine.generate(["a", "b", "c"], max_new_tokens=3, ignore_eos=True)
    ends = [event for event in run if isinstance(event, End)]
    assert run.results() == sorted(ends, key=lambda end: end.row)
    left = engine.generate("a")
    with pytest.raises(InputError, match="no more requests"):
        left.submit(Request("b"))
    left.close()
    with engine.open(reserve=64) as opened, pytest.raises(InputError, match="no end"):
        opened.results()
    for refused, message in ((run.result, "got 3; use results"), (left.result, "closed before")):
        with pytest.raises(InputError, match=message):
            refused()


def test_a_chat_goes_on_after_the_template(engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "chat_template", CHATML)
    prompt = engine.tokenizer.encode_chat(messages := [{"role": "user", "content": "Why?"}])
    wanted = engine.complete(prompt, seed=1, **COUPLED).token_ids
    for wrong in ([{"role": "robot", "content": "Why?"}], ["Why?"], 5):
        with pytest.raises(InputError, match=r"message.*; give"):
            engine.chat(wrong)
    for given in (messages, messages[0], "Why?"):
        assert engine.chat(given, seed=1, **COUPLED).result().token_ids == wanted
    _, [last] = asyncio.run(collect(engine.achat("Why?", seed=1, **COUPLED)))
    assert last.token_ids == wanted


class Answer(pydantic.BaseModel):
    number: int


def test_a_schema_is_json_a_dictionary_or_a_class_and_a_keyword_of_its_own(engine):
    schema = {"enum": [17, "x"]}
    assert Grammar("json_schema", schema) == Grammar("json_schema", json.dumps(schema))
    assert Grammar("choice", ["a"]) == Grammar("choice", '["a"]')
    assert Grammar("json_schema", {"enum": [":" * 9999]})  # which has one key
    assert json.loads(Grammar("json_schema", Answer).text)["required"] == ["number"]
    how = {"max_new_tokens": 40, "temperature": 1}
    assert engine.complete("x", json_schema=schema, **how).text in {"17", '"x"'}
    with pytest.raises(InputError, match="json_schema and grammar are both given; "):
        engine.complete("x", json_schema=schema, grammar=Grammar("regex", "a"))
    for kind, wrong in (("json_schema", {"enum": {1}}), ("regex", 5), ("json_schema", ["a"])):
        with pytest.raises(InputError, match="; "):
            Grammar(kind, wrong)


async def collect(events, most=10**6):
    """The first events, and those that end something."""
    found = []
    async for event in events:
        found.append(event)
        if len(found) == most:
            break
    await events.aclose()
    return found, [event for event in found if isinstance(event, End)]


def test_asyncio_gets_the_texts_of_the_loop_next_to_each_other(engine):
    """More than there are rows, some that need another run, and some that are wrong or leave."""
    prompts = [[5 + number, 6, 7] * (1 + number) for number in range(11)]
    order = []

    async def ask(number, prompt):
        how = {"seed": number, "method": "naive", "gamma1": 2 + (number > 8), **COUPLED}
        async for event in engine.agenerate(prompt, **how):
            order.append(number)
            last = event
        return last.token_ids

    async def ask_all():
        long = {"max_new_tokens": 300, "ignore_eos": True}
        others = [collect(engine.agenerate(prompt, **long)) for prompt in ([7] * 600, ["a", "b"])]
        others.append(collect(engine.agenerate("She had", **long), most=3))
        cancelled = asyncio.create_task(collect(engine.agenerate("She", **long)))
        asked = asyncio.gather(*map(ask, range(11), prompts))
        others = await asyncio.gather(*others, return_exceptions=True)
        cancelled.cancel()
        return others, await asked

    (*wrong, _), texts = asyncio.run(ask_all())
    assert [*map(type, wrong)] == [InputError] * 2
    changes = sum(one != other for one, other in itertools.pairwise(order))
    assert changes > 10  # one after the other: 10
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        assert text == engine.complete(prompt, seed=number, **COUPLED).token_ids


def test_a_scored_text_has_the_log_probabilities_of_plain_logits(engine):
    """A prompt may be scored while it is read, where that is asked for."""
    ids = engine.tokenizer.encode("She had been forced into prudence in her youth. " * 6)
    hidden = read_block(engine.model, [ids], new_cache(engine.config, capacity=400))
    scores = engine.model.logits(hidden)[0, :-1].log_softmax(-1)
    wanted = scores[range(len(ids) - 1), ids[1:]]
    found = engine.score(ids)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    assert engine.score(engine.tokenizer.decode(ids)).tolist() == found.tolist()
    engine.complete([5, 6, 7], max_new_tokens=1)
    held = engine.held_tokens
    assert engine.score([5] * 512).shape == (511,)
    assert engine.held_tokens == held
    how = {"logprobs": 2, "max_new_tokens": 3}
    requests = [Request(ids, 1, score_prompt=on, **how) for on in (True, False)]
    scored, plain = engine.stream(requests).results()
    assert [logprob for logprob, _ in scored.prompt_scores] == pytest.approx(wanted, abs=2e-5)
    assert all(len(top) == 2 and top[0][1] >= logprob for logprob, top in scored.prompt_scores)
    assert (plain.prompt_scores, plain.text) == ((), scored.text)
    for wrong in ([5], 3, [5] * 513):
        with pytest.raises(InputError, match="one token|the prompt is 3|513 tokens"):
            engine.score(wrong)


@pytest.mark.skipif(not has_kernels(), reason="there is no C++ compiler here")
def test_a_score_depends_on_nothing_but_the_text_before_it(folder):
    """In bfloat16, where most sums are rounded: not on later text, chunks, or other rows."""
    with minitri.load(folder, dtype="bfloat16", device="cpu") as engine:
        ids = engine.tokenizer.encode("She had been forced into prudence in her youth. " * 9)[:400]
        wanted = engine.score(ids).tolist()
        for length in (2, 130, 300):
            assert engine.score(ids[:length]).tolist() == wanted[: length - 1]
        requests = [Request(ids[n:], n, score_prompt=n == 0, max_new_tokens=9) for n in (0, 9, 0)]
        for chunk in (50, 1024):
            scored, _, beside = engine.stream(requests, batch_size=2, prefill_chunk=chunk).results()
            for end in (scored, beside):
                assert [logprob for logprob, _ in end.prompt_scores] == wanted


def test_threads_take_turns(engine):
    """Each thread has a run of its own, whose texts are those of the run alone."""

    def run(seed):
        return engine.complete([5, 6, 7] * (seed + 1), seed=seed, **COUPLED).token_ids

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(run, range(4))] == [*map(run, range(4))]


def test_an_engine_is_not_copied(engine):
    for refused in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(InputError, match="load it in each process"):
            refused(engine)


def test_a_closed_engine_has_no_weights_no_runs_and_no_use():
    async def close_meanwhile(engine):
        events = engine.agenerate([5], max_new_tokens=200, ignore_eos=True)
        await anext(events)
        engine.close()
        with pytest.raises(InputError, match="is closed; load it again"):
            await collect(events)

    with tiny_engine() as engine:
        run = engine.generate([5, 6])
        next(run)
        asyncio.run(close_meanwhile(engine))
    assert list(run) == []
    assert "closed" in repr(engine)
    uses = [lambda: engine.open(reserve=2), lambda: asyncio.run(collect(engine.agenerate([5])))]
    uses += [lambda: engine.complete([5]), lambda: engine.score([5, 6]), lambda: engine.model]
    for use in uses:
        with pytest.raises(InputError, match="^the engine is closed; load it again$"):
            use()
    engine.close()


SHORT = {"max_new_tokens": 2, "ignore_eos": True}


async def ask(engine):
    """How a text ends, within seconds."""
    task = asyncio.create_task(collect(engine.agenerate("She had", **SHORT)))
    assert (await asyncio.wait([task], timeout=60))[0], "still waiting"
    _, [end] = await task
    return end


@pytest.mark.parametrize("method", ["submit", "__next__"])
def test_a_request_that_fails_is_told_why_and_the_next_one_runs(method, caplog):
    broken = patch.object(minitri.Generation, method, side_effect=RuntimeError("broken"))
    with tiny_engine() as engine:
        with broken, pytest.raises(RuntimeError, match="broken"):
            asyncio.run(ask(engine))
        assert "the run failed: broken" in caplog.text
        assert asyncio.run(ask(engine)).finish_reason == "length"


def test_a_forked_process_is_told_so_and_does_not_wait():
    with tiny_engine() as engine:
        with patch("os.getpid", return_value=0), pytest.raises(InputError, match="forked"):
            engine.complete([5])
        asyncio.run(ask(engine))
        if (child := os.fork()) == 0:
            try:
                asyncio.run(ask(engine))
            except InputError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
